"""Which cases of all a run takes: a shard, a part of the list, and how much is explored beside it. No torch."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mla_conformance.files.whole import InputError

ROUND = 200  # cases that are drawn with one seed
_UNITS = {"s": 1, "m": 60, "h": 3600}
_MOST_DRAWS, _MOST_SECONDS = 10**6, 7 * 24 * 3600


@dataclass(frozen=True)
class Shard:
    index: int  # which part, counted from 1
    count: int  # how many parts there are
    cases: tuple[str, ...]  # ids of its cases, in the list's order

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def share(self, cases: Sequence[str]) -> tuple[str, ...]:
        return tuple(cases[self.index - 1 :: self.count])

    @staticmethod
    def of(text: str, cases: Sequence[str], seconds: Mapping[str, float] | None = None) -> "Shard":
        numbers = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
        index, count = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= index <= count:
            raise InputError(f"--shard: expected i/n with 1 <= i <= n, such as 2/3, got {text!r}")
        if count > len(cases):
            raise InputError(f"--shard: {count} shards for {len(cases)} cases: at least one would be empty")
        return Shard(index, count, split(cases, count, seconds or {})[index - 1])


def split(cases: Sequence[str], count: int, seconds: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Parts of about equal duration: the longest case first, always to the least loaded part.

    A case without a measured duration counts as the median. Equal arguments give equal parts on every machine.
    """
    usual = statistics.median(seconds.values()) if seconds else 1.0
    cost = {case: max(seconds.get(case, usual), 1e-3) for case in cases}
    load, part_of = [0.0] * count, {}
    for case in sorted(cases, key=cost.__getitem__, reverse=True):
        part = min(range(count), key=load.__getitem__)
        load[part] += cost[case]
        part_of[case] = part
    return [tuple(case for case in cases if part_of[case] == part) for part in range(count)]


class Extent(NamedTuple):
    """How much is explored of each backend; nothing by default, so that ``any`` of it is false."""

    draws: int = 0  # cases of each role; 0 where time decides
    seconds: int = 0  # that long over all roles; 0 where their number decides

    def __str__(self) -> str:
        return f"{self.seconds}s" if self.seconds else str(self.draws)

    @staticmethod
    def of(text: str) -> "Extent":
        found = re.fullmatch("([0-9]{1,9})([smh]?)", text)
        number, unit = (int(found[1]), found[2]) if found else (-1, "")
        extent = Extent(seconds=number * _UNITS[unit]) if unit else Extent(draws=number)
        if not found or extent.draws > _MOST_DRAWS or extent.seconds > _MOST_SECONDS or (unit and not number):
            raise InputError(
                f"expected a number of cases up to {_MOST_DRAWS:,}, or a time such as 90s, 10m or 1h, got {text!r}"
            )
        return extent
