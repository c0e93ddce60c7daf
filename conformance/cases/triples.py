"""Triples of classes: those whose classes are pairs two by two, and which rows hold them. No torch."""

from collections.abc import Iterable, Sequence

from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.space import ClassOf, Row, held

Triple = tuple[ClassOf, ClassOf, ClassOf]
"""Three classes, in the order of their dimensions."""


class Triples:
    """A set of triples of classes: for each two classes a mask of those that make triples with them.

    Args:
        pairs: every two classes of a triple are one of them; all triples of which this holds are in the set.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs, self._values = pairs, pairs.space.values
        self._numbers = {value: number for number, value in enumerate(self._values)}
        partners = [pairs.partners(value) for value in self._values]
        self._thirds = [
            [own & other if own >> number & 1 else 0 for number, other in enumerate(partners)] for own in partners
        ]
        self._most: dict[int, tuple[int, int]] = {}

    def drop(self, row: Row) -> None:
        """Without those of a row."""
        mask, numbers = ~self._pairs.mask(row), self._of(row)
        for first in numbers:
            self._most.pop(first, None)
            thirds = self._thirds[first]
            for second in numbers:
                thirds[second] &= mask

    def dense(self, name: str, labels: Sequence[str], row: Row, small: bool = False) -> list[str]:
        """Classes of a dimension behind a row, those with most triples first; of small batches before all others."""
        mask, numbers = self._pairs.mask(row), self._of(row)
        usual = self._pairs.space.small.get(name, labels) if small else labels

        def gain(label: str) -> tuple[bool, int]:
            thirds = self._thirds[self._numbers[name, label]]
            return label in usual, sum((thirds[number] & mask).bit_count() for number in numbers)

        return sorted(labels, key=gain, reverse=True)

    def new_in(self, rows: Iterable[Row]) -> int:
        """A number that grows with the triples which rows hold together."""
        return sum(map(self.held_by, rows))

    def held_by(self, row: Row) -> int:
        """How many of the triples a row holds, each counted three times or more."""
        mask, numbers = self._pairs.mask(row), self._of(row)
        return sum((self._thirds[first][second] & mask).bit_count() for first in numbers for second in numbers)

    def densest(self) -> Triple | None:
        """A triple of the two classes that are in most; None if there is none left."""
        for first in range(len(self._values)):
            if first not in self._most:
                counts = [mask.bit_count() for mask in self._thirds[first]]
                self._most[first] = max(counts), -counts.index(max(counts))
        first = max(range(len(self._values)), key=self._most.__getitem__)
        second = -self._most[first][1]
        third = self._thirds[first][second]
        if not third:
            return None
        one, two, three = sorted((first, second, (third & -third).bit_length() - 1))
        return self._values[one], self._values[two], self._values[three]

    def _of(self, row: Row) -> list[int]:
        return [self._numbers[value] for value in held(row) if value in self._numbers]

    def __len__(self) -> int:
        return sum(mask.bit_count() for thirds in self._thirds for mask in thirds) // 6
