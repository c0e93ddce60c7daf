"""The judge's numbers, read from tolerance.toml."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


class ToleranceError(ValueError):
    """A table that does not hold what the judge needs."""


@dataclass(frozen=True)
class Tolerance:
    """The numbers by name; see tolerance.toml for the reason of each."""

    float32_accumulation: float
    keys_per_step: float
    fp22_accumulation: float
    fp22_keys_per_step: float
    approximate_exp: float
    element_limit: float
    row_deviations: float
    lse_limit: float


def read_tolerance(text: str, source: str) -> Tolerance:
    """Parse a table of numbers.

    Raises:
        ToleranceError: an unknown or missing entry, an entry without a reason, or a value that is not a positive
            number.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ToleranceError(f"{source}: not TOML: {error}") from error
    names = set(Tolerance.__dataclass_fields__)
    if set(table) != names:
        odd = ", ".join(sorted(set(table) ^ names))
        raise ToleranceError(f"{source}: expected exactly the entries {', '.join(sorted(names))}; check {odd}")
    for name, entry in table.items():
        if not isinstance(entry, dict):
            raise ToleranceError(f"{source}: expected a table [{name}] with value and reason, got {entry!r}")
        value = entry.get("value")
        if not str(entry.get("reason", "")).strip():
            raise ToleranceError(f"{source}: entry [{name}] has no reason")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ToleranceError(f"{source}: entry [{name}] expects a positive value, got {value!r}")
    return Tolerance(**{name: float(entry["value"]) for name, entry in table.items()})


@cache
def tolerance() -> Tolerance:
    """The table that the suite ships."""
    return read_tolerance((files("mla_conformance.judging") / "tolerance.toml").read_text(), "tolerance.toml")
