"""Classes of numbers, and how their members are chosen. No torch.

What stands for a class comes first, whatever else belongs to it behind. Rules ask the first members alone; the cases of
a row have members that are drawn from whole classes, so that no class is judged by its smallest one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from mla_conformance.cases.grammar import CaseError

SOME = 4  # members of a class that are tried where something else decides as well
_FAVOURED = (  # numbers that engines use and kernels turn at, whatever they count
    *(6, 10, 12, 14, 18, 20, 24, 33, 65, 97, 129, 257, 513, 640, 768, 1000, 1025, 1100, 1537, 1792, 1920, 2049, 3072),
    *(4096, 4097, 4200, 8193, 9000, 16_385, 17_000, 32_769, 33_000, 50_000, 65_535, 65_537, 70_000, 131_073),
)
_NEAR = 4  # how many times the member that stands for a class others are that are drawn without being favoured
_TRIES = 8
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Numbers:
    # by the name of a class, its members, a range or a tuple each; the first class that holds a number counts
    parts: Mapping[str, Sequence[Sequence[int]]]
    most: int = 2**31  # the largest that is drawn
    sizes: bool = True  # whether they are sizes or counts, of which engines favour some
    _found: dict[int, str | None] = field(default_factory=dict)

    def class_of(self, number: int) -> str | None:
        if number not in self._found:
            held = (label for label, parts in self.parts.items() if any(number in part for part in parts))
            self._found[number] = next(held, None)
        return self._found[number]

    def members(self, label: str) -> Iterator[int]:
        """The members of a class, the one that stands for it first."""
        return (number for number in chain.from_iterable(self.parts[label]) if self.class_of(number) == label)

    @cached_property
    def some(self) -> Mapping[str, Sequence[int]]:
        return {label: tuple(islice(self.members(label), SOME)) for label in self.parts}

    @cached_property
    def favoured(self) -> Mapping[str, Sequence[int]]:
        """Of each class the members that are named; of sizes its ends as far as they are near, and what engines use."""
        found = {}
        for label, parts in self.parts.items():
            named = chain.from_iterable(part for part in parts if isinstance(part, tuple))
            ends = [end for part in parts for end in (part[0], part[-1]) if end <= _NEAR * self.first(label)]
            known = dict.fromkeys((self.first(label), *named, *((*ends, *_FAVOURED) if self.sizes else ())))
            found[label] = tuple(n for n in known if n <= self.most and self.class_of(n) == label)
        return found

    def first(self, label: str) -> int:
        return self.some[label][0]

    def least(self, label: str) -> int:
        return min(part[0] if isinstance(part, range) else min(part) for part in self.parts[label])


class Labels(NamedTuple):
    """Classes of whatever a function tells them of."""

    parts: Sequence[str]  # their names
    class_of: Callable[[Any], str | None]


@dataclass(frozen=True)
class Draw:
    key: str = ""  # a hash of it decides; without one it is always the first, which stands for its class

    def __bool__(self) -> bool:
        return bool(self.key)

    def below(self, end: int, *of: object) -> int:
        """A number below the end, the same for the same questions."""
        if not self.key:
            return 0
        return int.from_bytes(blake2b(f"{self.key}|{of}".encode(), digest_size=8).digest()) % end

    def pick(self, found: Sequence[_T], *of: object) -> _T:
        return found[self.below(len(found), *of)]

    def near(self, least: int, most: int, *of: object) -> int:
        """A number from the least to the most, each doubling as likely as any other."""
        doublings = (most // least).bit_length() if least > 0 else 1
        start = max(least, 1) << self.below(doublings, "doubling", *of)
        return min(most, start + self.below(start, "within", *of)) if self.key else least

    def of(self, classes: Numbers, label: str, *of: object) -> int:
        """A member of a class: every second time a favoured one."""
        if not self.key:
            return classes.first(label)
        whole = classes.parts[label][-1]
        for attempt in range(_TRIES if self.below(2, "favoured", label, *of) else 0):
            stands = max(classes.first(label), whole[0])
            least, most = max(whole[0], stands // _NEAR), min(whole[-1], classes.most, _NEAR * stands)
            number = self.near(least, max(most, least), label, attempt, *of)
            if isinstance(whole, range):
                number = whole[min((number - whole.start) // whole.step, len(whole) - 1)]
            if classes.class_of(number) == label:
                return number
        return self.pick(classes.favoured[label], label, *of)

    def some(self, classes: Numbers, label: str, *of: object) -> Sequence[int]:
        if not self.key:
            return classes.some[label]
        return tuple(dict.fromkeys(self.of(classes, label, each, *of) for each in range(SOME)))


PLAIN = Draw()  # what stands for each class


def first(found: Iterable[_T]) -> _T:
    """The first of what is found; CaseError if nothing is."""
    for each in found:
        return each
    raise CaseError("no members of the classes go together")
