"""How much is explored: so many cases, or so long. No torch."""

import re
from dataclasses import dataclass

from mla_conformance.files.inputs import InputError

_UNITS = {"s": 1, "m": 60, "h": 3600}
_MOST_DRAWS, _MOST_SECONDS = 10**6, 7 * 24 * 3600


@dataclass(frozen=True)
class Extent:
    """How much is explored of each backend; nothing by default.

    Attributes:
        draws: cases of each role; 0 where time decides.
        seconds: that long over all roles; 0 where their number decides.
    """

    draws: int = 0
    seconds: int = 0

    def __bool__(self) -> bool:
        return bool(self.draws or self.seconds)

    def __str__(self) -> str:
        return f"{self.seconds}s" if self.seconds else str(self.draws)

    @staticmethod
    def of(text: str) -> "Extent":
        """The extent that is written as ``2000``, ``90s``, ``10m`` or ``1h``.

        Raises:
            InputError: something else, or more than anybody waits for.
        """
        found = re.fullmatch("([0-9]{1,9})([smh]?)", text)
        number, unit = (int(found[1]), found[2]) if found else (-1, "")
        extent = Extent(seconds=number * _UNITS[unit]) if unit else Extent(draws=number)
        if not found or extent.draws > _MOST_DRAWS or extent.seconds > _MOST_SECONDS or (unit and not number):
            raise InputError(
                f"expected a number of cases up to {_MOST_DRAWS:,}, or a time such as 90s, 10m or 1h, got {text!r}"
            )
        return extent
