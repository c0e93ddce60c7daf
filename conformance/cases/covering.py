"""Covering arrays: few rows that together hold every pair of classes that a row can hold. No torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from mla_conformance.cases.space import ClassOf, Row, Space, held

_T = TypeVar("_T")
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
        mask = self.mask(row)
        for value in held(row):
            if value in self._bits:
                self._partners[value] |= mask & ~self._bits[value]

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

    def held_by(self, row: Row) -> int:
        """How many of the pairs a row holds, each counted twice."""
        mask = self.mask(row)
        return sum(self.gain(value, mask) for value in held(row) if value in self._bits)

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
    space: Space, missing: Pairs, made: Callable[[Row], _T | None], small: bool = False
) -> tuple[list[_T], Pairs]:
    """What is made of rows that hold all pairs which are missing and which such a row holds; and the other pairs.

    Args:
        space: what they are of.
        missing: pairs.
        made: what becomes of a row once it is found; None refuses it, and one with smaller batches is tried then.
        small: only rows with batches as small as can be.
    """
    rows: list[_T] = []
    left, without = missing | Pairs(space), Pairs(space)

    while pair := next(iter(left), None):
        tried = (True,) if small else (False, True)
        for few in tried:
            row = space.completed(pair, partial(left.dense, small=few))
            if row and (case := made(row)) is not None:
                rows.append(case)
                left.drop(row)
                break
        else:
            without.add(dict(pair))
            left.drop(dict(pair))
    return rows, without


def choose(rows: Sequence[Row], given: Iterable[Row]) -> list[int]:
    """Numbers of few rows that, with the ``given`` ones, hold every class that all rows hold."""
    missing = {value for row in rows for value in held(row)} - {value for row in given for value in held(row)}
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(missing.intersection(held(rows[number]))))
        chosen.append(best)
        missing.difference_update(held(rows[best]))
    return sorted(chosen)
