"""Cases that follow a kernel: rows that hold every pair of classes of the region which it declares. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.space import ClassOf, Preference, Row, Space, held

Supports = Callable[[Sequence[Case]], Sequence[bool]]
"""Which of some cases a kernel declares that it supports, on its device."""
_BASES = 3
"""Supported rows that are tried as what else a row is like, of each class of a pair."""


@dataclass
class Region:
    """What a kernel declares of a space.

    Attributes:
        space: the space.
        rows: rows that it supports.
        fitted: those of them that hold pairs which no listed case holds.
    """

    space: Space
    rows: list[Row]
    fitted: list[Row]

    @property
    def classes(self) -> Mapping[str, list[str]]:
        """Of each dimension, the classes that some supported row has, in the order of the dimension."""
        found = {value for row in self.rows for value in held(row)}
        return {
            each.name: [label for label in each.classes if (each.name, label) in found]
            for each in self.space.dimensions
        }

    @property
    def cases(self) -> tuple[Case, ...]:
        """The fitted cases."""
        return tuple(map(self.space.case_of, self.fitted))


def fit(space: Space, listed: Sequence[Case], supports: Supports, reachable: Pairs) -> Region:
    """The region of a kernel, found by asking.

    Args:
        space: of the kernel's role.
        listed: cases that everybody is asked.
        supports: what it says of cases.
        reachable: the pairs that rows of the device's size hold.
    """
    asked = supports(listed)
    rows = [space.row_of(case) for case, supported in zip(listed, asked, strict=True) if supported]
    return _Fitting(Region(space, rows, []), supports, reachable).region if rows else Region(space, [], [])


class _Fitting:
    """Finding further rows; what is refused once is not asked again."""

    def __init__(self, region: Region, supports: Supports, reachable: Pairs) -> None:
        self.region, self._supports = region, supports
        self._with: dict[ClassOf, list[Row]] = {}
        for row in region.rows:
            self._index(row)
        self._left = reachable - Pairs(region.space, region.rows)
        self._decides: set[str] | None = None
        self._decides = self._find_classes()
        self._find_pairs()

    def _index(self, row: Row) -> None:
        for value in held(row):
            self._with.setdefault(value, []).append(row)

    def _find_classes(self) -> set[str]:
        """Try each class that no supported row has; the dimensions that have a refused one."""
        refused = set()
        for value in self.region.space.values:
            if value not in self._with and not self._try((value,), self.region.rows[:_BASES]):
                refused.add(value)
        self._left.leave(refused)
        return {name for name, _ in refused}

    def _find_pairs(self) -> None:
        while pair := next(iter(self._left), None):
            bases = [row for value in pair for row in self._with[value][-_BASES:]]
            if not self._try(pair, bases):
                self._left.drop(dict(pair))

    def _try(self, wanted: Sequence[ClassOf], bases: Iterable[Row]) -> bool:
        """Whether a row with these classes, in all that decides about support like one of the bases, is supported."""
        for base in bases:
            row = self.region.space.completed(wanted, self._like(base))
            if row and self._supports([self.region.space.case_of(row)])[0]:
                self._keep(row)
                return True
        return False

    def _keep(self, row: Row) -> None:
        self.region.rows.append(row)
        self.region.fitted.append(row)
        self._index(row)
        self._left.drop(row)

    def _like(self, base: Row) -> Preference:
        """What decides about support as the base has it, everything else as it holds most of the missing pairs."""

        def prefer(name: str, labels: Sequence[str], row: Row) -> list[str]:
            if self._decides is None or name in self._decides:
                return sorted(labels, key=lambda label: label != base.get(name))
            return self._left.dense(name, labels, row, small=True)

        return prefer
