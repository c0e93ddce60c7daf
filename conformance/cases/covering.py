"""Covering arrays: few rows that together hold every pair, or many triples, of the classes of a space. No torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import product
from operator import itemgetter
from typing import Any, ClassVar, Self

from mla_conformance.cases import dimensions, grammar
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.classes import Draw
from mla_conformance.cases.space import DATA, ClassOf, Row, Space

_MOST_REGIMES = 16  # data regimes that requests of a case have in turn
_ENDS = sorted({max(1, times * 2**power + more) for power in range(18) for times in (1, 3) for more in (-1, 0, 1)})
_DRAWN, _CANDIDATES = 60, 300  # lengths that are drawn besides, and requests of which the best one is taken
_ANY = 0  # in place of a number of new tokens, where a request may have any
Pair = tuple[ClassOf, ClassOf]  # in the order of their dimensions
Numbered = tuple[list[int], int]  # classes as their numbers, and a mask of what they hold together


class Missing:
    """Pairs or triples that are to be held; classes are numbered, and sets of them are masks."""

    repeated: ClassVar[int]  # how often each of them is in the masks

    def __init__(self, space: Space) -> None:
        self.space, self.values, self._numbers = space, space.values, space.numbers
        self.masks = [0] * len(self.values)  # of each class, what it is to be held with

    def numbered(self, row: Row) -> Numbered:
        """The classes of a row, as numbers and in a mask; one that the space does not have is in neither."""
        numbers, mask = [self._numbers[value] for value in row.items() if value in self._numbers], 0
        for number in numbers:
            mask |= 1 << number
        return numbers, mask

    def copy(self) -> Self:
        found = copy(self)
        found.masks = list(self.masks)
        return found

    def drop(self, row: Row) -> None:
        numbers, mask = self.numbered(row)
        for number in numbers:
            self.masks[number] &= ~mask

    def new_in(self, rows: Iterable[Row]) -> int:
        """A number that grows with what rows hold together."""
        return sum(map(self.held_by, rows))

    def held_by(self, row: Row) -> int:
        return self.held_among(*self.numbered(row))

    def held_among(self, numbers: list[int], mask: int) -> int:
        """A number that grows with those that a row's classes hold."""
        return sum((self.masks[number] & mask).bit_count() for number in numbers)

    def dense(self, name: str, labels: Sequence[str], row: Row, small: bool = False) -> list[str]:
        """Classes of a dimension behind a row, those with most first; of small batches before all others."""
        (_, others), usual = self.numbered(row), self.space.small.get(name, labels) if small else labels
        gains = {label: (self.masks[self._numbers[name, label]] & others).bit_count() for label in labels}
        return sorted(labels, key=lambda label: (label in usual, gains[label]), reverse=True)

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask in self.masks) // self.repeated


class Pairs(Missing):
    """A set of pairs of classes, at first those of rows: each class has a mask of those that it is paired with."""

    repeated = 2

    def __init__(self, space: Space, rows: Iterable[Row] = ()) -> None:
        super().__init__(space)
        for row in rows:
            self.add(row)

    @staticmethod
    def every(space: Space) -> "Pairs":
        found = Pairs(space)
        for number, (name, _) in enumerate(found.values):
            found.masks[number] = sum(1 << n for n, (other, _) in enumerate(found.values) if other != name)
        return found

    def add(self, row: Row) -> None:
        numbers, mask = self.numbered(row)
        for number in numbers:
            self.masks[number] |= mask & ~(1 << number)

    def leave(self, values: Iterable[ClassOf]) -> None:
        gone = {self._numbers[value] for value in values}
        mask = sum(1 << number for number in gone)
        self.masks = [0 if number in gone else own & ~mask for number, own in enumerate(self.masks)]

    def densest(self, most: int = 1) -> list[Pair]:
        """Of so many classes that are in most pairs, each with that partner which is in most others."""
        counts, found = [own.bit_count() for own in self.masks], list[Any]()
        for first in sorted(range(len(counts)), key=counts.__getitem__, reverse=True)[:most]:
            if own := self.masks[first]:
                second = max((number for number in range(len(counts)) if own >> number & 1), key=counts.__getitem__)
                found.append(tuple(self.values[number] for number in sorted((first, second))))
        return list(dict.fromkeys(found))

    def new_in(self, rows: Iterable[Row]) -> int:
        return len(self) - len(self - Pairs(self.space, rows))

    def __sub__(self, other: "Pairs") -> "Pairs":
        found = Pairs(self.space)
        found.masks = [own & ~others for own, others in zip(self.masks, other.masks, strict=True)]
        return found

    def __iter__(self) -> Iterator[Pair]:
        for number, own in enumerate(self.masks):
            later = own >> number + 1
            while later:
                yield self.values[number], self.values[number + (later & -later).bit_length()]
                later &= later - 1


class FinePairs:
    """Pairs of classes and residues that are to be held by members of rows, at first those that no given case holds."""

    def __init__(self, space: Space, given: Iterable[Case]) -> None:
        self._fine = tuple(dimensions.residues())
        finer = replace(space, dimensions=(*space.dimensions, *self._fine))
        self._left = Pairs.every(finer) - Pairs(finer, map(finer.row_of, given))

    def held_by(self, row: Row, case: Case) -> int:
        return self._left.held_by(self._finer(row, case))

    def drop(self, row: Row, case: Case) -> None:
        self._left.drop(self._finer(row, case))

    def _finer(self, row: Row, case: Case) -> Row:
        return {**row, **{each.name: each.class_of(case) or "" for each in self._fine}}


class Triples(Missing):
    """All triples of classes that are pairs two by two.

    For each class the masks of those with which it and each other one make triples stand behind each other in one
    number: what a row holds of them is one product and one ``and`` for each of its classes.
    """

    repeated = 6

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs.space)
        self._width = width = len(self.values)
        for first, own in enumerate(pairs.masks):
            seconds = ((number, other) for number, other in enumerate(pairs.masks) if own >> number & 1)
            self.masks[first] = sum((own & other) << number * width for number, other in seconds)
        # of each class, while it has this mask: triples with the class of which it has most, and that one, negative
        self._most: dict[int, tuple[int, int, int]] = {}

    def numbered(self, row: Row) -> Numbered:
        numbers, mask = super().numbered(row)
        return numbers, mask * sum(1 << number * self._width for number in numbers)

    def _with_each(self, number: int) -> list[int]:
        every, own = (1 << self._width) - 1, self.masks[number]
        return [own >> other * self._width & every for other in range(self._width)]

    def densest(self) -> tuple[ClassOf, ClassOf, ClassOf] | None:
        """A triple of the two classes that are in most; None if there is none left."""
        for number, mask in enumerate(self.masks):
            if number not in self._most or self._most[number][0] is not mask:
                counts = [thirds.bit_count() for thirds in self._with_each(number)]
                self._most[number] = mask, max(counts), -counts.index(max(counts))
        first = max(range(self._width), key=lambda number: self._most[number][1:])
        second = -self._most[first][2]
        third = self._with_each(first)[second]
        if not third:
            return None
        one, two, three = sorted((first, second, (third & -third).bit_length() - 1))
        return self.values[one], self.values[two], self.values[three]


def filled(space: Space, case: Case, left: Missing, fits: Callable[[Case], bool]) -> Case:
    """The case with other requests beside its longest one, whose lengths and data regimes hold what is missing.

    They become shorter until the case ``fits``. A case that others add nothing to stays as it is.
    """
    row, before = space.row_of(case), left.new_in(space.rows((case,)))
    # Of what part of the longest lengths others are, at most; the next one where they are too much work.
    for part in (1, 4, 16, 64, 0) if len(case.q) > 1 else ():
        with suppress(CaseError):
            other = _with_requests(space, case, row, left, part)
            if left.new_in(space.rows((other,))) > before and fits(other) and space.row_of(other) == row:
                return other
    return case


def _with_requests(space: Space, case: Case, row: Row, left: Missing, part: int) -> Case:
    q, kv, missing = list(case.q), list(case.kv), left.copy()
    missing.drop(row)
    slots = min(len(q), _MOST_REGIMES)
    many = bool(space.regimes) and row.get(DATA) == case.data
    regimes = {request % slots: case.data for request in case.leading if many}
    found = _requests(space, case, row, part) if part else {}

    @cache
    def numbered(new: int, regime: str) -> list[tuple[grammar.Lengths, Row, Numbered]]:
        """What requests of so many new tokens may be, beside the data regime of their slot where it has one."""
        own: Row = {DATA: regime} if regime else {}
        alike = found.get(new, found.get(_ANY, {}))
        return [(lengths, of, missing.numbered({**of, **own})) for lengths, of in alike.items()]

    most: dict[tuple[int, str], tuple[int, grammar.Lengths, Row]] = {}  # what adds most, until something is added
    for request in (n for n in range(len(q)) if n not in case.leading):
        slot, asked, best = request % slots, (q[request], regimes.get(request % slots, "")), None
        if numbered(*asked) and q[request] and (not kv or kv[request]):  # those without keys stay so
            if asked not in most:
                gains = ((missing.held_among(*classes), lengths, of) for lengths, of, classes in numbered(*asked))
                most[asked] = max(gains, key=itemgetter(0))
            gain, lengths, of = most[asked]
            if gain:
                best, q[request], kv[request : request + 1] = of, lengths[0], lengths[1:]
        own = best or space.row_of_request(row, case, request)
        if many and slot not in regimes:
            regimes[slot] = max(space.regimes, key=lambda label: missing.held_by({**own, DATA: label}))
        own = {**own, **({DATA: regimes[slot]} if many else {})}
        if missing.held_by(own):
            missing.drop(own)
            most.clear()
    data = "+".join(regimes[slot] for slot in range(slots)) if len(regimes) == slots else case.data
    return replace(case, q=tuple(q), kv=tuple(kv), data=data)


def _requests(space: Space, case: Case, row: Row, part: int) -> Mapping[int, Mapping[grammar.Lengths, Row]]:
    """What other requests may be, tokens and context, by their new tokens, or under ``_ANY`` if these are free."""
    free = not any(each.name == "queries" for each in space.dimensions) and row.get("others") != "equal"
    fixed = not case.kv or row.get("contexts", row.get("others")) == "equal"
    if fixed and not free:
        return {}
    draw, most = Draw(case.id), max(case.kv, default=0)
    new = _lengths((max(case.q) - 1) // part, draw) if free else sorted({*case.q} - {0})
    pairs = list(product(new, [most] if fixed else _lengths((most - 1) // part, draw)))
    if len(pairs) > _CANDIDATES:
        pairs = [draw.pick(pairs, "request", number) for number in range(_CANDIDATES)]
    # A batch of them all, behind the longest; what bounds it is no matter of one of them.
    every: dict[str, Any] = {"q": (max(case.q), *(n for n, _ in pairs)), "workspace": 2 * len(pairs) * case.page}
    every |= {"kv": (most, *(n for _, n in pairs))} if case.kv else {}
    every |= {"decodes": 0} if hasattr(case, "decodes") else {}
    batch, found = replace(case, **every), dict[int, dict[grammar.Lengths, Row]]()
    known = set[tuple[int, tuple[str, ...]]]()
    for request, lengths in enumerate(pairs, 1):
        of, key = space.row_of_request(row, batch, request), _ANY if free else lengths[0]
        if (labels := (key, tuple(of.values()))) not in known:
            known.add(labels)
            found.setdefault(key, {})[lengths if case.kv else lengths[:1]] = of
    return found


def _lengths(most: int, draw: Draw) -> list[int]:
    drawn = (draw.near(1, max(1, most), "length", number) for number in range(_DRAWN))
    return [length for length in dict.fromkeys((*_ENDS, *drawn)) if length <= most] or [1]
