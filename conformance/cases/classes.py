"""Classes of numbers: what stands for a class comes first, whatever else belongs to it behind. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice

SOME = 4
"""Members of a class that are tried where something else decides as well."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers in classes.

    Attributes:
        parts: by the name of a class, its members, a range or a tuple each; the first class that holds a number counts.
    """

    parts: Mapping[str, Sequence[Sequence[int]]]
    _found: dict[int, str | None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def class_of(self, number: int) -> str | None:
        """The class that a number is in."""
        if number not in self._found:
            held = (label for label, parts in self.parts.items() if any(number in part for part in parts))
            self._found[number] = next(held, None)
        return self._found[number]

    def members(self, label: str) -> Iterator[int]:
        """The members of a class, the one that stands for it first."""
        return (number for number in chain.from_iterable(self.parts[label]) if self.class_of(number) == label)

    @cached_property
    def some(self) -> Mapping[str, Sequence[int]]:
        """The first members of each class, which are tried where something else decides as well."""
        return {label: tuple(islice(self.members(label), SOME)) for label in self.parts}

    def first(self, label: str) -> int:
        """The member that stands for a class."""
        return self.some[label][0]

    def least(self, label: str) -> int:
        """The smallest member."""
        return min(map(min, self.parts[label]))


def exactly(*numbers: int) -> dict[str, Sequence[Sequence[int]]]:
    """A class for each number."""
    return {str(number): ((number,),) for number in numbers}
