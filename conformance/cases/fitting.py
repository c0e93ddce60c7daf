"""Cases that follow a kernel: rows that hold every pair of classes of the region which it declares. No torch.

Beside them, if that is asked for, rows that hold many triples.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from mla_conformance.cases.case import Case
from mla_conformance.cases.covering import Pairs, Triples, filled
from mla_conformance.cases.space import ClassOf, Row, Space, held
from mla_conformance.cases.work import work_of

Supports = Callable[[Sequence[Case]], Sequence[bool]]
"""Which of some cases a kernel declares that it supports, on its device."""
_DRAWS = 2
"""Draws of members of a row that a kernel is asked whether it supports them."""
_BASES = 3
"""Supported rows that are tried as what else a row is like, of each class of a pair."""
MOST_TRIPLES, _MOST_TRIES = 500, 1500
"""Cases of a role that are fitted for triples, those that hold most first, and triples that are tried for them."""


@dataclass(frozen=True)
class HeldTriples:
    claimed: int  # whose classes are supported two by two, as far as the device is asked for them
    before: int  # that are held by rows for pairs
    held: int  # that rows for triples hold as well
    vain: int  # that were tried, and no row was found that is supported and of the device's size


@dataclass
class Region:
    """What a kernel declares of a space."""

    space: Space
    rows: list[Row]  # of cases that it supports, and those of their other requests
    # those that hold pairs which no listed case holds, and for triples behind them
    cases: list[Case] = field(default_factory=list)
    triples: HeldTriples | None = None  # what is held of them, if they were asked for

    @property
    def classes(self) -> Mapping[str, list[str]]:
        found = {value for row in self.rows for value in held(row)}
        return {
            each.name: [label for label in each.classes if (each.name, label) in found]
            for each in self.space.dimensions
        }


def fit(
    space: Space,
    cases: Sequence[Case],
    supports: Supports,
    reachable: Pairs,
    most: float,
    triples: bool = False,
    salt: str = "",
) -> Region:
    """The region of a kernel: of the listed ``cases`` that it supports, and of what it ``supports`` beside them.

    Its pairs are ``reachable`` ones; cases of more than the ``most`` work are taken where a pair needs them. Members of
    rows are drawn with the salt.
    """
    fitting = _Fitting(space, cases, supports, reachable, most, salt)
    if triples:
        light = (case for case in (*cases, *fitting.region.cases) if work_of(case) <= most)
        fitting.find_triples(Pairs(space, space.rows(light)))
    return fitting.region


class _Fitting:
    def __init__(
        self,
        space: Space,
        cases: Iterable[Case],
        supports: Supports,
        reachable: Pairs,
        most: float,
        salt: str,
    ) -> None:
        self.region, self._supports, self._most, self._needs = Region(space, []), supports, most, True
        self._salt = salt
        self._left: Pairs | Triples
        self._refused: set[tuple[ClassOf, ...]] = set()
        self._with: dict[ClassOf, list[Row]] = {}
        for case in cases:
            self._add(case)
        self._decides = {each.name for each in space.dimensions}
        refused = set(space.values)
        while refused.intersection(self._with):  # at first, and once rows have a class that seemed refused
            left = self._left = reachable - Pairs(space, self.region.rows)
            refused = self._find_classes()
            left.leave(refused)
            self._decides = {name for name, _ in refused}
            while dense := left.densest():  # of the classes that lack most; what these decide against is left for later
                if not self._try(dense[0], [self._with[value][-1] for value in dense[0]]):
                    left.drop(dict(dense[0]))
            left = self._left = reachable - Pairs(space, self.region.rows)
            left.leave(refused)
            self._find_pairs(left)

    def _add(self, case: Case) -> list[Row]:
        first, *further = rows = list(self.region.space.rows((case,)))
        self.region.rows += rows
        known = set(held(first))
        for value in known:
            self._with.setdefault(value, []).append(first)
        for row in further:
            for value in set(held(row)) - known:
                self._with.setdefault(value, []).append({**first, **row})
        return rows

    def _find_classes(self) -> set[ClassOf]:
        return {
            value
            for value in self.region.space.values
            if value not in self._with and not self._try((value,), self.region.rows[:_BASES])
        }

    def _find_pairs(self, left: Pairs) -> None:
        while pair := next(iter(left), None):
            bases = [row for value in pair for row in self._with[value][-_BASES:]]
            while not self._try(pair, bases):
                further = self._deciding(pair, bases)
                if not further:
                    left.drop(dict(pair))
                    break
                self._decides.add(further)

    def find_triples(self, pairs: Pairs) -> None:
        """Rows for triples of these pairs, the densest first, until there are enough."""
        claimed, left, fitted = len(Triples(pairs)), self._without_held(pairs), self.region.cases
        before, enough, self._needs = claimed - len(left), len(fitted) + MOST_TRIPLES, False
        self._left = left
        for _ in range(_MOST_TRIES):
            triple = left.densest()
            if triple is None or len(fitted) == enough:
                break
            if not self._try(triple, [row for value in triple for row in self._with[value][-1:]]):
                left.drop(dict(triple))
        lacking = len(self._without_held(pairs))  # a row may hold what was tried in vain before
        self.region.triples = HeldTriples(claimed, before, claimed - lacking, lacking - len(left))

    def _without_held(self, pairs: Pairs) -> Triples:
        found = Triples(pairs)
        for row in self.region.rows:
            found.drop(row)
        return found

    def _try(self, wanted: Sequence[ClassOf], bases: Iterable[Row]) -> bool:
        """Whether a row with these classes, in all that decides about support like one of the bases, is supported."""
        case = next(filter(None, (self._supported(wanted, base, self._decides) for base in bases)), None)
        if case:
            several = filled(self.region.space, case, self._left, self._is_light)
            case = several if several == case or all(self._supports((several,))) else case
            self.region.cases.append(case)
            for row in self._add(case):
                self._left.drop(row)
        return case is not None

    def _deciding(self, wanted: Sequence[ClassOf], bases: Iterable[Row]) -> str | None:
        """A further dimension that decides: a row is refused, and supported once it is there like a base as well."""
        free = [each.name for each in self.region.space.dimensions if each.name not in self._decides]
        for base in bases:
            if self._supported(wanted, base, {*self._decides, *free}):
                few, enough = 0, len(free)
                while enough - few > 1:
                    middle = (few + enough) // 2
                    supported = self._supported(wanted, base, {*self._decides, *free[:middle]})
                    few, enough = (few, middle) if supported else (middle, enough)
                return free[enough - 1]
        return None

    def _supported(self, wanted: Sequence[ClassOf], base: Row, alike: Collection[str]) -> Case | None:
        """A supported case with these classes: as the base in some dimensions, else with most of the missing pairs."""

        def prefer(name: str, labels: Sequence[str], row: Row) -> list[str]:
            if name in alike:
                return sorted(labels, key=lambda label: label != base.get(name))
            return self._left.dense(name, labels, row, small=True)

        row = self.region.space.completed(wanted, prefer)
        if not row or (known := tuple(row.items())) in self._refused:
            return None
        case = self._member(row)
        if not case:
            self._refused.add(known)
        return case

    def _member(self, row: Row) -> Case | None:
        """A supported case of a row: of light ones with drawn members that which adds most, or that with the first."""
        *drawn, plain = self.region.space.drawn(row, self._salt, _DRAWS)
        for tried in (list(filter(self._is_light, drawn)), [plain] if self._needs or self._is_light(plain) else []):
            if supported := list(compress(tried, self._supports(tried)) if tried else ()):
                return max(supported, key=lambda case: self._left.new_in(self.region.space.rows((case,))))
        return None

    def _is_light(self, case: Case) -> bool:
        return work_of(case) <= self._most
