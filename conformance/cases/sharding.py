"""Shards: the parts into which several machines divide one case list, each case in exactly one. No torch."""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mla_conformance.files.inputs import InputError


@dataclass(frozen=True)
class Shard:
    """One part of a case list.

    Attributes:
        index: which part, counted from 1.
        count: how many parts there are.
        cases: ids of its cases, in the list's order.
    """

    index: int
    count: int
    cases: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def share(self, cases: Sequence[str]) -> tuple[str, ...]:
        """The part of other cases that goes with this one, in turn."""
        return tuple(cases[self.index - 1 :: self.count])

    @staticmethod
    def of(text: str, cases: Sequence[str], seconds: Mapping[str, float] | None = None) -> "Shard":
        """The part ``i/n`` of a list.

        Args:
            text: for example ``2/3``.
            cases: ids of the whole list.
            seconds: measured durations by case id, to balance by; without them by the number of cases.

        Raises:
            InputError: malformed, or more parts than cases.
        """
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
