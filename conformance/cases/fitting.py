"""Cases that follow a kernel: rows that hold every pair of classes of the region which it declares. No torch.

Behind them, if that is asked for, those of its dispatch grid, a cell for each instance that kernels choose by heads,
query tokens and the like, and then those that hold most triples.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import compress, cycle, product
from typing import Any

from mla_conformance.cases.batches import HEADS
from mla_conformance.cases.case import SESSIONS, Case, CaseError
from mla_conformance.cases.covering import FinePairs, Pairs, Triples, filled
from mla_conformance.cases.dense import PLANNED, drawn_case
from mla_conformance.cases.grammar import Fields
from mla_conformance.cases.space import ClassOf, Row, Space, held
from mla_conformance.cases.work import CPU_WORK, is_light, work_of

Supports = Callable[[Sequence[Case]], Sequence[bool]]  # which of some cases a kernel declares, on its device
_DRAWS, _FINE_DRAWS = 2, 8  # of members of a row that a kernel is asked for, for pairs and behind them
_DENSE_DRAWS = 5  # dense batches that are drawn for each one that is taken
_BASES = 3  # supported rows that are tried as what else a row is like, of each class of a pair
_TRIES = 3  # triples that are tried for each case
_MOST_SESSIONS, _SESSION_WORK = 3, 4e7  # of a role, and of one of their calls
_MORE = 4  # how many times the first batch's requests another one of a session has at most
# Dimensions that make mistakes visible and that no kernel chooses by: beside them a triple is another pair.
_SURROUNDINGS = ("scale", "tails", "poison", "maxima")
_GRID_HEADS = (1, 2, 4, 6, 8, 16, 20, 32, 64, 128)
_NO_NUMBERS: Fields = {}
_GRID_QUERIES = {"1": 1, "2": 2, "4": 4, "5 to 8": 8}


@dataclass
class Region:
    """What a kernel declares of a space."""

    space: Space
    rows: list[Row]  # of cases that it supports, and those of their other requests
    # those that hold pairs which no listed case holds, and for triples behind them
    cases: list[Case] = field(default_factory=list)
    # if they were asked for, how many of them have classes that are supported two by two, as far as the device is asked
    # for them; that rows for pairs hold; that rows for triples hold as well; that were tried, and no row was found that
    # is supported and of the device's size
    triples: tuple[int, int, int, int] | None = None

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
    triples: int = 0,
    salt: str = "",
    sessions: Sequence[Case] = (),
) -> Region:
    """The region of a kernel: of the listed ``cases`` that it supports, and of what it ``supports`` beside them.

    Its pairs are ``reachable`` ones; cases of more than the ``most`` work are taken where a pair needs them. Behind
    them so many are found for the grid and for ``triples``, light ones on any device, since those of a GPU's work would
    take half of its run, and sessions beside listed ones. Members of rows are drawn with the salt.
    """
    fitting = _Fitting(space, supports, most, salt)
    fitting.find_pairs(cases, reachable)
    if triples:
        fitting.find_triples(list(filter(is_light, (*cases, *fitting.region.cases))), triples)
        fitting.find_sessions(sessions)
    return fitting.region


def cells_of(space: Space, classes: Mapping[str, Sequence[str]]) -> Iterator[tuple[Row, Fields]]:
    """Those of the grids of a space among some classes: their classes, and the numbers that stand for them."""
    heads = [{"heads": number} for number in _GRID_HEADS if "heads" in classes]
    for names in space.grids:
        for number, labels in product(heads or [{}], product(*map(classes.__getitem__, names))):
            cell = dict(zip(names, labels, strict=True))
            cell |= {name: str(HEADS.class_of(n)) for name, n in number.items()}
            if cell.get("queries", "1") in _GRID_QUERIES and cell.get("heads", "") in classes.get("heads", [""]):
                queries = {"q": (_GRID_QUERIES[cell["queries"]],)} if "queries" in cell else {}
                ordered = {each.name: cell[each.name] for each in space.dimensions if each.name in cell}
                yield ordered, {**number, **queries}


def _with(case: Case, numbers: Fields) -> Case | None:
    if not numbers:
        return case
    with suppress(CaseError):
        return replace(case, **{**numbers, **({"q": numbers["q"] * len(case.q)} if "q" in numbers else {})})
    return None


class _Fitting:
    def __init__(self, space: Space, supports: Supports, most: float, salt: str) -> None:
        self.region, self._supports, self._most, self._needs = Region(space, []), supports, most, True
        self._salt, self._decides = salt, {each.name for each in space.dimensions}
        self._left: Pairs | Triples
        self._fine: FinePairs | None = None
        self._refused: set[tuple[ClassOf, ...]] = set()
        self._with: dict[ClassOf, list[Row]] = {}

    def find_pairs(self, cases: Iterable[Case], reachable: Pairs) -> None:
        """Cases for pairs of classes that no given case holds, as far as they are reachable."""
        space = self.region.space
        for case in cases:
            self._add(case)
        refused = set(space.values)
        while refused.intersection(self._with):  # at first, and once rows have a class that seemed refused
            left = self._left = reachable - Pairs(space, self.region.rows)
            refused = {
                value
                for value in space.values
                if value not in self._with and not self._try((value,), self.region.rows[:_BASES])
            }
            left.leave(refused)
            self._decides = {name for name, _ in refused}
            while dense := left.densest():  # of the classes that lack most; what these decide against is left for later
                if not self._try(dense[0], [self._with[value][-1] for value in dense[0]]):
                    left.drop(dict(dense[0]))
            left = self._left = reachable - Pairs(space, self.region.rows)
            left.leave(refused)
            while pair := next(iter(left), None):
                bases = [row for value in pair for row in self._with[value][-_BASES:]]
                while not self._try(pair, bases):
                    further = self._deciding(pair, bases)
                    if not further:
                        left.drop(dict(pair))
                        break
                    self._decides.add(further)

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

    def find_triples(self, light: Sequence[Case], many: int) -> None:
        """Cases for cells of the grid that no light case holds, then for the densest of the triples of its pairs."""
        space, fitted = self.region.space, self.region.cases
        pairs = Pairs(space, space.rows(light))
        pairs.leave(value for value in space.values if value[0] in _SURROUNDINGS)
        claimed, left = len(Triples(pairs)), self._without_held(pairs)
        before, enough, self._needs = claimed - len(left), len(fitted) + many, False
        self._left, self._most, self._fine = left, CPU_WORK, (fine := FinePairs(space, light))

        def found_in(case: Case) -> set[tuple[str, Any]]:
            return {*space.row_of(case).items(), ("heads", case.heads), ("q", case.q[:1])}

        known = [found_in(case) for case in light]
        for cell, numbers in cells_of(space, self.region.classes):
            if not any({*cell.items(), *numbers.items()} <= each for each in known):
                bases = [row for value in cell.items() for row in self._with[value][-1:]]
                if self._try([*cell.items()], bases, numbers):
                    known.append(found_in(fitted[-1]))
        classes, batches = self.region.classes, many * 2 // 5  # dense ones, of several that are drawn for each
        drawn = (drawn_case(space, f"{self._salt}|{n}", classes) for n in range(_DENSE_DRAWS * batches))
        found = [*dict.fromkeys(filter(None, drawn))]
        rows = {case: space.row_of(case) for case in compress(found, self._supports(found))}
        for _ in range(min(batches, len(rows))):
            best = max(rows, key=lambda case: fine.held_by(rows[case], case))
            self._take(best)
            del rows[best]
        # In turn a class that is more work than usual: long batches, many heads and so on.
        small, classes = space.small, self.region.classes
        larger = [(name, label) for name in small for label in classes.get(name, ()) if label not in small[name]]
        sizes = cycle([*larger, None])
        for _ in range(_TRIES * many):
            triple = left.densest()
            if triple is None or len(fitted) >= enough:
                break
            bases, large = [row for value in triple for row in self._with[value][-1:]], next(sizes)
            tried = [(*triple, large)] if large and large[0] not in dict(triple) else []
            if not any(self._try(wanted, bases) for wanted in (*tried, triple)):
                left.drop(dict(triple))
        lacking = len(self._without_held(pairs))  # a row may hold what was tried in vain before
        self.region.triples = claimed, before, claimed - lacking, lacking - len(left)

    def find_sessions(self, known: Sequence[Case]) -> None:
        """Sessions of a role that has known ones: for pairs of classes that none of them holds, densest first."""
        space, fitted = self.region.space, self.region.cases
        before, work, rows = len(fitted), 0.0, [*self.region.rows]
        self._fine, self._most, self._needs = None, _SESSION_WORK, False
        known = [*compress(known, self._supports(known))] if known else []
        left = self._left = Pairs(space, self.region.rows) - Pairs(space, space.rows(known))
        while known and work < CPU_WORK and len(fitted) < before + _MOST_SESSIONS and (pairs := left.densest()):
            if self._try(pairs[0], [row for value in pairs[0] for row in self._with[value][-1:]]):
                case = fitted[-1]
                # Other batches of a session have more contexts, each of which needs a page of the workspace.
                pages: Fields = {"workspace": case.page * _MORE * len(case.q)} if case.call in PLANNED else {}
                fitted[-1] = replace(case, capability=SESSIONS, **pages)
                work += work_of(fitted[-1])
            else:
                left.drop(dict(pairs[0]))
        self.region.rows = rows  # a session is no verdict on a pair that nothing else holds

    def _without_held(self, pairs: Pairs) -> Triples:
        found = Triples(pairs)
        for row in self.region.rows:
            found.drop(row)
        return found

    def _try(self, wanted: Sequence[ClassOf], bases: Iterable[Row], numbers: Fields = _NO_NUMBERS) -> bool:
        """Whether a row with these classes, in all that decides about support like one of the bases, is supported."""
        found = (self._supported(wanted, base, self._decides, numbers) for base in bases)
        case = next(filter(None, found), None)
        if case:
            several = filled(self.region.space, case, self._left, self._is_light)
            case = several if several == case or all(self._supports((several,))) else case
            self._take(case)
        return case is not None

    def _take(self, case: Case) -> None:
        self.region.cases.append(case)
        for row in (rows := self._add(case)):
            self._left.drop(row)
        if self._fine:
            self._fine.drop(rows[0], case)

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

    def _supported(
        self, wanted: Sequence[ClassOf], base: Row, alike: Collection[str], numbers: Fields = _NO_NUMBERS
    ) -> Case | None:
        """A supported case with these classes: as the base in some dimensions, else with most of the missing pairs."""

        def prefer(name: str, labels: Sequence[str], row: Row) -> list[str]:
            if name in alike:
                return sorted(labels, key=lambda label: label != base.get(name))
            return self._left.dense(name, labels, row, small=True)

        row = self.region.space.completed(wanted, prefer)
        if not row or (known := (*row.items(), *numbers.items())) in self._refused:
            return None
        case = self._member(row, numbers)
        if not case:
            self._refused.add(known)
        return case

    def _member(self, row: Row, numbers: Fields) -> Case | None:
        """A supported case of a row: of light ones with drawn members that which adds most, or that with the first."""
        space, left, fine = self.region.space, self._left, self._fine

        def adds(case: Case) -> int:
            return fine.held_by(row, case) if fine else left.new_in(space.rows((case,)))

        *drawn, plain = (_with(case, numbers) for case in space.drawn(row, self._salt, _FINE_DRAWS if fine else _DRAWS))
        kept = [case for case in drawn if case and self._is_light(case) and not (numbers and space.outside(case))]
        for tried in (kept, [plain] if plain and (self._needs or self._is_light(plain)) else []):
            if supported := list(compress(tried, self._supports(tried)) if tried else ()):
                return max(supported, key=adds)
        return None

    def _is_light(self, case: Case) -> bool:
        return work_of(case) <= self._most
