"""Covering arrays: few rows that together hold every pair of classes that a row can hold. No torch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Protocol, TypeVar

from mla_conformance.cases.case import Case
from mla_conformance.cases.space import DATA, ClassOf, Row, Space, held

_T = TypeVar("_T")
_MOST_REGIMES = 16
"""Data regimes that requests of a case have in turn, at most."""
_COMPARED = 4
"""Rows of which the one that holds most of what is missing is taken."""
Pair = tuple[ClassOf, ClassOf]
"""Two classes, in the order of their dimensions."""


class Pairs:
    """A set of pairs of classes: for each class a mask of those that it is paired with.

    Args:
        space: whose classes they are.
        rows: the pairs that these hold; a class that the space does not have is in none.
    """

    def __init__(self, space: Space, rows: Iterable[Row] = ()) -> None:
        self.space = space
        self._bits = {value: 1 << number for number, value in enumerate(space.values)}
        self._partners = dict.fromkeys(self._bits, 0)
        for row in rows:
            self.add(row)

    @staticmethod
    def every(space: Space) -> "Pairs":
        """All classes of every two dimensions."""
        found = Pairs(space)
        for each in space.dimensions:
            own = [(each.name, label) for label in each.classes]
            others = sum(bit for value, bit in found._bits.items() if value not in own)
            found._partners.update(dict.fromkeys(own, others))
        return found

    def add(self, row: Row) -> None:
        """And those of a row."""
        bits = {value: self._bits[value] for value in held(row) if value in self._bits}
        mask = sum(bits.values())
        for value, bit in bits.items():
            self._partners[value] |= mask & ~bit

    def drop(self, row: Row) -> None:
        """Without those of a row."""
        mask = self.mask(row)
        for value in held(row):
            if value in self._bits:
                self._partners[value] &= ~mask

    def leave(self, values: Iterable[ClassOf]) -> None:
        """Without all pairs of these classes."""
        mask = sum(self._bits[value] for value in values)
        for value, bit in self._bits.items():
            self._partners[value] &= 0 if bit & mask else ~mask

    def dense(self, name: str, labels: Sequence[str], row: Row, small: bool = False) -> list[str]:
        """Classes of a dimension behind a row, those with most pairs first; of small batches before all others."""
        mask, usual = self.mask(row), self.space.small.get(name, labels) if small else labels
        return sorted(labels, key=lambda label: (label in usual, self.gain((name, label), mask)), reverse=True)

    def mask(self, row: Row) -> int:
        """A row's classes."""
        return sum(self._bits.get(value, 0) for value in held(row))

    def partners(self, value: ClassOf) -> int:
        """The classes that one is paired with, as a mask."""
        return self._partners[value]

    def densest(self, most: int = 1) -> list[Pair]:
        """Of so many classes that are in most pairs, each with that partner which is in most others."""

        def count(value: ClassOf) -> int:
            return self._partners[value].bit_count()

        found = []
        for first in sorted(filter(count, self._partners), key=count, reverse=True)[:most]:
            second = max((value for value, bit in self._bits.items() if bit & self._partners[first]), key=count)
            found.append((first, second) if self._bits[first] < self._bits[second] else (second, first))
        return list(dict.fromkeys(found))

    def held_by(self, row: Row) -> int:
        """How many of the pairs a row holds, each counted twice."""
        mask = self.mask(row)
        return sum(self.gain(value, mask) for value in held(row) if value in self._bits)

    def new_in(self, rows: Iterable[Row]) -> int:
        """How many of the pairs rows hold together."""
        return len(self) - len(self - Pairs(self.space, rows))

    def gain(self, value: ClassOf, mask: int) -> int:
        """Pairs of a class with those of a mask."""
        return (self._partners[value] & mask).bit_count()

    def _with(self, partners: dict[ClassOf, int]) -> "Pairs":
        found = Pairs(self.space)
        found._partners = partners
        return found

    def __sub__(self, other: "Pairs") -> "Pairs":
        return self._with({value: mask & ~other._partners[value] for value, mask in self._partners.items()})

    def __or__(self, other: "Pairs") -> "Pairs":
        return self._with({value: mask | other._partners[value] for value, mask in self._partners.items()})

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask in self._partners.values()) // 2

    def __iter__(self) -> Iterator[Pair]:
        values = list(self._bits)
        for number, (value, mask) in enumerate(self._partners.items()):
            later = mask >> number + 1
            while later:
                lowest = (later & -later).bit_length()
                yield value, values[number + lowest]
                later &= later - 1


def cover(
    space: Space,
    missing: Pairs,
    made: Callable[[Row, Pairs], _T | None],
    rows_of: Callable[[_T], Iterable[Row]],
    small: bool = False,
) -> tuple[list[_T], Pairs]:
    """Cases of rows that hold all pairs which are missing and which such a row holds; and the other pairs.

    Args:
        space: what they are of.
        missing: pairs.
        made: the case of a row once it is found, and of what is still missing; None refuses it, and one with smaller
            batches is tried then.
        rows_of: what a case holds.
        small: only rows with batches as small as can be.
    """
    found: list[_T] = []
    left, without = missing | Pairs(space), Pairs(space)

    while pairs := left.densest(_COMPARED):
        case = None
        for few in (True,) if small else (False, True):
            rows = (space.completed(pair, partial(left.dense, small=few)) for pair in pairs)
            for row in sorted(filter(None, rows), key=left.held_by, reverse=True):
                case = case or made(row, left)
        if case:
            found.append(case)
            for each in rows_of(case):
                left.drop(each)
        else:
            without.add(dict(pairs[0]))
            left.drop(dict(pairs[0]))
    return found, without


class Missing(Protocol):
    """Pairs or triples that are to be held."""

    def held_by(self, row: Row) -> int:
        """A number that grows with those that a row holds."""


def mixed(space: Space, case: Case, left: Missing) -> Case:
    """The case with other data regimes of requests that are not its longest: those that add most of what is missing.

    A case of one request, and one whose regimes are no dimension, stay as they are.
    """
    row, slots = space.row_of(case), min(len(case.q), _MOST_REGIMES)
    own = {request % slots for request in case.leading}
    if not space.regimes or len(own) == slots or row.get(DATA) != case.data:
        return case
    gains = {label: left.held_by(space.beside(row, label)) for label in space.regimes if label != case.data}
    chosen = sorted((label for label, gain in gains.items() if gain), key=lambda label: -gains[label])
    if not chosen:
        return case
    others = cycle(chosen[: slots - len(own)])
    return replace(case, data="+".join(row[DATA] if slot in own else next(others) for slot in range(slots)))


def choose(cases: Sequence[Collection[ClassOf]], given: Iterable[ClassOf]) -> list[int]:
    """Numbers of few cases that, with the ``given`` classes, hold every class that all of them hold."""
    missing = set().union(*cases) - set(given)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(missing.intersection(cases[number])))
        chosen.append(best)
        missing.difference_update(cases[best])
    return sorted(chosen)
