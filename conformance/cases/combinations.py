"""What varies in the cases of a role, and the combinations of it that a tier must hold. No torch.

Beside the hand-picked lists, the full tier holds every pair of these values and the nightly tier every triple, as far
as a case can have them; what the lists hold already is not added again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case

Dimensions = Mapping[str, Sequence[str]]
Row = Mapping[str, str]
Allowed = Callable[[Row], bool]
"""Whether a row that may still lack dimensions can become one; more values never make it allowed again."""
Combination = frozenset[tuple[str, str]]
"""(dimension, value) pairs."""


def covered(rows: Iterable[Row], dimensions: Dimensions, strength: int) -> set[Combination]:
    """The combinations that rows hold; a value that is not listed is in none."""
    return {combination for row in rows for combination in _held(row, dimensions, strength)}


def required(dimensions: Dimensions, strength: int, allowed: Allowed) -> list[Combination]:
    """Every combination that some allowed row holds, in the order of the dimensions and values."""
    usual = {name: values[0] for name, values in dimensions.items()}

    def can_be(combination: Combination) -> bool:
        row = dict(combination)  # mostly the first values of the other dimensions go with it
        return allowed({**usual, **row}) or _completed(row, dimensions, allowed) is not None

    return [combination for combination in _every(dimensions, strength) if can_be(combination)]


def cover(dimensions: Dimensions, strength: int, given: Iterable[Row], allowed: Allowed) -> list[Row]:
    """Rows that together with the ``given`` ones hold every combination of ``strength`` dimensions."""
    have = covered(given, dimensions, strength)
    missing = dict.fromkeys(combination for combination in _every(dimensions, strength) if combination not in have)
    rows: list[Row] = []

    def gain(row: Row, pair: tuple[str, str]) -> int:
        others = combinations(row.items(), strength - 1)
        return sum(frozenset((pair, *other)) in missing for other in others)

    while missing:
        wanted = next(iter(missing))
        row = _completed(dict(wanted), dimensions, allowed, gain)
        if row is None:
            del missing[wanted]
            continue
        for combination in _held(row, dimensions, strength):
            missing.pop(combination, None)
        rows.append(row)
    return rows


def _every(dimensions: Dimensions, strength: int) -> Iterator[Combination]:
    """The combinations of all values, in the order of the dimensions and values."""
    for names in combinations(dimensions, strength):
        for values in product(*(dimensions[name] for name in names)):
            yield frozenset(zip(names, values, strict=True))


def choose(rows: Sequence[Row], dimensions: Dimensions, strength: int, given: Iterable[Row]) -> list[int]:
    """Numbers of few rows that, with the ``given`` ones, hold every combination that all rows hold."""
    held = [covered([row], dimensions, strength) for row in rows]
    missing = set().union(*held) - covered(given, dimensions, strength)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(held[number] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _held(row: Row, dimensions: Dimensions, strength: int) -> Iterator[Combination]:
    pairs = [(name, row[name]) for name, values in dimensions.items() if row.get(name) in values]
    return map(frozenset, combinations(pairs, strength))


def _completed(
    row: dict[str, str],
    dimensions: Dimensions,
    allowed: Allowed,
    gain: Callable[[Row, tuple[str, str]], int] = lambda row, pair: 0,
) -> dict[str, str] | None:
    """An allowed row that holds ``row``, each further value the one of the largest gain that can be; None without."""
    if not allowed(row):
        return None
    name = next((name for name in dimensions if name not in row), None)
    if name is None:
        return {name: row[name] for name in dimensions}
    for value in sorted(dimensions[name], key=lambda value: gain(row, (name, value)), reverse=True):
        grown = _completed({**row, name: value}, dimensions, allowed, gain)
        if grown is not None:
            return grown
    return None


PAIRS, TRIPLES = 2, 3
DimensionValues = Mapping[str, Mapping[str, Any]]
"""The values of a dimension with the fields of a case that each stands for."""


@dataclass(frozen=True)
class Space:
    """The dimensions of a role's cases.

    Attributes:
        role: whose cases they are.
        capability: the one whose cases are the further ones.
        counted: the capabilities whose cases are judged by one right call, as those are.
        fields: dimensions, each with its values; where two serve as well, the first is taken.
        shaped: those of them that have no field of their own, only a share in the shape of the batch.
        shape: the fields that the shaped dimensions of a row decide.
        possible: whether a row that may still lack dimensions can become a case in which each value has an effect.
        parts: what kernels are often confined to, as the values left of some dimensions; {} is the whole. Each part is
            covered on its own, in this order, so that a kernel that takes no more meets every pair of what it takes.
    """

    role: Role
    capability: str
    counted: tuple[str, ...]
    fields: Mapping[str, DimensionValues]
    shaped: tuple[str, ...]
    shape: Callable[[Row], Mapping[str, Any]]
    possible: Allowed
    parts: tuple[Dimensions, ...] = ({},)

    @cached_property
    def dimensions(self) -> Dimensions:
        """Names of the dimensions and of their values."""
        return {name: tuple(values) for name, values in self.fields.items()}

    def case_of(self, row: Row) -> Case:
        """The case of a row that has every dimension."""
        values = {name: value for part in row for name, value in self.fields[part][row[part]].items()}
        return Case.of(**{"capability": self.capability, **self.shape(row), **values})

    def row_of(self, case: Case) -> Row:
        """The values that a case has; a dimension of which it has another value is missing."""
        found = {
            name: label
            for name, values in self.fields.items()
            for label, wanted in values.items()
            if wanted and _has(case, wanted)
        }
        for labels in product(*(self.fields[name] for name in self.shaped)):
            row = {**found, **dict(zip(self.shaped, labels, strict=True))}
            if _has(case, self.shape(row)):
                return row
        return found

    def further_cases(self, cases: Iterable[Case], strength: int) -> tuple[Case, ...]:
        """The cases that ``cases`` lack for this strength."""
        given, found = self._rows(cases), list[Row]()
        for part in self.parts:
            within = [row for row in (*given, *found) if _lies_in(row, part)]
            found += cover({**self.dimensions, **part}, strength, within, self.possible)
        return tuple(map(self.case_of, found))

    def telling_cases(self, further: Sequence[Case], cases: Iterable[Case]) -> tuple[Case, ...]:
        """Few of the further cases, with which every value that they hold is in some case."""
        numbers = choose(list(map(self.row_of, further)), self.dimensions, 1, self._rows(cases))
        return tuple(further[number] for number in numbers)

    def lacking(self, cases: Iterable[Case], strength: int) -> list[Combination]:
        """The combinations of so many dimensions that cases can have, and these do not."""
        have = covered(self._rows(cases), self.dimensions, strength)
        return [combination for combination in self._required(strength) if combination not in have]

    def count(self, strength: int) -> int:
        """The combinations of so many dimensions that cases can have."""
        return len(self._required(strength))

    def counts(self, case: Case) -> bool:
        """Whether the values that a case has count as reached."""
        return case.capability in (*self.counted, self.capability) and case.role is self.role

    def _required(self, strength: int) -> list[Combination]:
        if strength not in self._found:
            self._found[strength] = required(self.dimensions, strength, self.possible)
        return self._found[strength]

    @cached_property
    def _found(self) -> dict[int, list[Combination]]:
        return {}

    def _rows(self, cases: Iterable[Case]) -> list[Row]:
        return [self.row_of(case) for case in cases if self.counts(case)]


def _lies_in(row: Row, part: Dimensions) -> bool:
    return all(row.get(name) in values for name, values in part.items())


def _has(case: Case, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(case, field) == value for field, value in wanted.items())
