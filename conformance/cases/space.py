"""The space of a role's cases: dimensions in boundary classes, and the rules for what goes together. No torch.

Lists, covering arrays, drawn cases and the account of what was judged all name cases by their classes. Which member of
a class a case has is drawn: a kernel that is right for the smallest one need not be right for the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from inspect import signature
from itertools import chain
from operator import contains
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, CaseError
from mla_conformance.cases.classes import PLAIN, Draw, Labels, Numbers
from mla_conformance.cases.grammar import Fields

NOTHING = ""  # the class of a dimension that has no say in a row
Row = Mapping[str, str]  # classes by dimension; a case outside of a dimension's classes lacks it
ClassOf = tuple[str, str]  # a dimension and a class of it
# The order in which the classes of a dimension are tried behind a row.
Preference = Callable[[str, Sequence[str], Row], Iterable[str]]
DATA = "data"  # the dimension of which requests of one case may have different classes
_DRAWS = 12  # how often members are drawn for a row, before those that stand for its classes are taken


@dataclass(frozen=True)
class Only:
    name: str = ""  # another dimension, which stands before it; empty where it always has one
    classes: tuple[str, ...] = ()  # those of its classes beside which it has one
    why: str = ""  # why it has none beside the others


ALWAYS = Only()


@dataclass(frozen=True)
class Dimension:
    name: str
    # the fields that each class stands for by itself, the plainest first; none where the batch's shape decides
    classes: Mapping[str, Fields]
    class_of: Callable[[Any], str | None]  # the class of a case; None outside of all
    only: Only = ALWAYS  # where it has a say
    drawn: tuple[str, Numbers] | None = None  # a field, and the numbers that are drawn for it
    # the class of a request of a case, where each has its own and ``class_of`` tells that of the longest
    of_request: Callable[[Any, int], str | None] | None = None

    def has_say(self, row: Row) -> bool:
        return not self.only.name or row.get(self.only.name) in self.only.classes


def plain(name: str, classes: Mapping[str, Fields], only: Only = ALWAYS) -> Dimension:
    def class_of(case: Case) -> str | None:
        fits = (label for label, own in classes.items() if all(getattr(case, name) == own[name] for name in own))
        return next(fits, None)

    return Dimension(name, classes, class_of, only)


def values(name: str, field: str, *found: Any, only: Only = ALWAYS) -> Dimension:
    classes: dict[str, Fields] = {str(value): {field: value} for value in found}
    if field != DATA:
        return plain(name, classes, only)
    known = {label: label for label in classes}.get
    return Dimension(name, classes, lambda x: known(x.regimes[0]), only, of_request=lambda x, n: known(x.data_of(n)))


def measured(
    name: str,
    classes: Iterable[str],
    class_of: Callable[[Any], str | None],
    only: Only = ALWAYS,
    of_request: Callable[[Any, int], str | None] | None = None,
) -> Dimension:
    return Dimension(name, {label: {} for label in classes}, class_of, only, of_request=of_request)


def counted(name: str, classes: Numbers | Labels, of: Callable[[Any], Any], only: Only = ALWAYS) -> Dimension:
    return measured(name, classes.parts, lambda case: classes.class_of(of(case)), only)


def by_length(
    name: str,
    classes: Numbers | Labels,
    lengths: Callable[[Any], Sequence[int]],
    only: Only = ALWAYS,
    of: Callable[[Any, int], Any] = lambda case, length: length,
) -> Dimension:
    """Classes of the longest of some lengths of requests and of each one's own, or of what ``of`` makes of them."""

    def of_request(case: Case, request: int) -> str | None:
        return classes.class_of(of(case, lengths(case)[request]))

    return measured(name, classes.parts, lambda case: classes.class_of(of(case, max(lengths(case)))), only, of_request)


@dataclass(frozen=True)
class Rule:
    why: str  # in a sentence
    over: tuple[str, ...]  # dimensions
    holds: Callable[..., bool]  # whether classes of these go together
    always: bool = False  # asked even where one of them has no say

    @cached_property
    def _known(self) -> Callable[..., bool]:
        return cache(self.holds)

    def allows(self, row: Row) -> bool:
        classes = [row.get(name) for name in self.over]
        return None in classes or (NOTHING in classes and not self.always) or self._known(*classes)


def rule(why: str, holds: Callable[..., bool], always: bool = False) -> Rule:
    """Over the dimensions that the parameters are named after."""
    return Rule(why, tuple(name.replace("_", " ") for name in signature(holds).parameters), holds, always)


def spans(*labels: str) -> dict[str, Sequence[Sequence[int]]]:
    """Classes of the numbers that their labels tell, as ``17 to 64`` or ``257 to 1,024``."""
    ends = {label: [int(number) for number in label.replace(",", "").split(" to ")] for label in labels}
    return {label: (range(least, most + 1),) for label, (least, most) in ends.items()}


def exactly(*numbers: int) -> dict[str, Sequence[Sequence[int]]]:
    return {str(number): ((number,),) for number in numbers}


def never(why: str, together: Mapping[str, Sequence[str]]) -> Rule:
    classes = tuple(together.values())
    return Rule(why, tuple(together), lambda *labels: not all(map(contains, classes, labels)))


@dataclass(frozen=True)
class Space:
    role: Role
    capability: str  # the one whose cases the covering arrays are
    dimensions: tuple[Dimension, ...]  # what varies; one that depends on another stands behind it
    rules: tuple[Rule, ...]  # what does not go together
    shape: Callable[[Row, Draw], Fields]  # the fields of a row that no dimension gives by itself
    small: Mapping[str, Sequence[str]]  # of the dimensions that decide how much work a case is, classes of little work
    grids: tuple[tuple[str, ...], ...] = ()  # dimensions by which, together with the heads, kernels are dispatched
    _orders: dict[frozenset[str], Sequence[Dimension]] = field(default_factory=dict)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which says what it draws from, and would read each lambda's source for that."""
        printer.text(self.capability)

    @cached_property
    def values(self) -> tuple[ClassOf, ...]:
        return tuple((each.name, label) for each in self.dimensions for label in each.classes)

    @cached_property
    def numbers(self) -> Mapping[ClassOf, int]:
        return {value: number for number, value in enumerate(self.values)}

    @cached_property
    def regimes(self) -> tuple[str, ...]:
        """The data regimes that requests of one case may have; none where all of them have one."""
        own = (each for each in self.dimensions if each.name == DATA and not each.only.name)
        return tuple(label for each in own for label in each.classes)

    def case_of(self, row: Row, draw: Draw = PLAIN, further: Fields | None = None) -> Case:
        """A case of a row that has every dimension; CaseError if none can be this row with the drawn members."""
        fields: Fields = {"capability": self.capability}
        for each in self.dimensions:
            if each.drawn and row[each.name] in each.classes:
                name, numbers = each.drawn
                fields[name] = draw.of(numbers, row[each.name], each.name)
            else:
                fields |= each.classes.get(row[each.name], {})
        case = Case.of(**{**fields, **self.shape(row, draw), **(further or {})})
        if draw and self.row_of(case) != row:
            raise CaseError(f"{case.id}: other classes than those that its members were drawn from")
        return case

    def drawn(self, row: Row, salt: str = "", tries: int = _DRAWS) -> Iterator[Case]:
        """Cases of a row whose members are drawn by a hash of it and of a salt; at last that with the first ones."""
        key = f"{salt}|{self.capability}|{'|'.join(row.values())}"
        for number in range(tries):
            with suppress(CaseError):
                yield self.case_of(row, Draw(f"{key}|{number}"))
        yield self.case_of(row)

    def row_of(self, case: Case) -> Row:
        """The classes of a case; one that it is in none of is missing."""
        row: dict[str, str] = {}
        for each in self.dimensions:
            label = each.class_of(case) if each.has_say(row) else NOTHING
            if label is not None:
                row[each.name] = label
        return row

    def rows(self, cases: Iterable[Case]) -> Iterator[Row]:
        """The classes that cases hold together: of each case with its longest request, then with each other one."""
        for case in cases:
            row = self.row_of(case)
            yield row
            known = set[tuple[tuple[str, str], ...]]()
            requests = {(new, case.kv[n] if case.kv else 0, case.data_of(n)): n for n, new in enumerate(case.q) if new}
            for other in (self.row_of_request(row, case, request) for request in requests.values()):
                if (labels := tuple(other.items())) not in known and other != row:
                    known.add(labels)
                    yield other

    def row_of_request(self, row: Row, case: Case, request: int) -> Row:
        """The classes of a case with those of one request in place of its longest one's."""
        own = {name: of(case, request) for name, of in self._of_requests.items() if row.get(name, NOTHING) != NOTHING}
        return {name: kept for name, label in row.items() if (kept := own.get(name, label)) is not None}

    def classes_of(self, case: Case) -> set[ClassOf]:
        return {value for row in self.rows((case,)) for value in held(row)}

    @cached_property
    def _of_requests(self) -> Mapping[str, Callable[[Any, int], str | None]]:
        return {each.name: each.of_request for each in self.dimensions if each.of_request}

    def outside(self, case: Case) -> list[str]:
        row = self.row_of(case)
        return [each.name for each in self.dimensions if each.name not in row]

    def completed(
        self,
        wanted: Iterable[ClassOf],
        prefer: Preference = lambda name, labels, row: labels,
        rules: Sequence[Rule] | None = None,
    ) -> Row | None:
        """A row that holds the wanted classes and breaks no rule, each further class the first of those preferred."""
        row, asked = dict(wanted), self.all_rules if rules is None else rules
        if not all(rule.allows(row) for rule in asked):
            return None
        over = {each.name: tuple(rule for rule in asked if each.name in rule.over) for each in self.dimensions}
        if self._grow(self._order(frozenset(row)), row, prefer, over) is not None:
            return None
        return {each.name: row[each.name] for each in self.dimensions}

    def _grow(
        self, left: Sequence[Dimension], row: dict[str, str], prefer: Preference, over: Mapping[str, Sequence[Rule]]
    ) -> set[str] | None:
        """Add a class of every dimension that is left; else the dimensions before them whose classes do not let it.

        Other classes of a dimension that is not blamed would not help: the search goes back past it.
        """
        if not left:
            return None
        each, *rest = left
        blamed = {each.only.name} if each.only.name else set()
        for label in prefer(each.name, tuple(each.classes), row) if each.has_say(row) else (NOTHING,):
            row[each.name] = label
            broken = next((rule for rule in over[each.name] if not rule.allows(row)), None)
            further = set(broken.over) if broken else self._grow(rest, row, prefer, over)
            if further is None:
                return None
            del row[each.name]
            if each.name not in further:
                return further
            blamed |= further
        return blamed - {each.name}

    def _order(self, wanted: frozenset[str]) -> Sequence[Dimension]:
        """Other dimensions; first those that share a rule with what stands before, so that less is tried in vain."""
        if wanted not in self._orders:
            named, found = {each.name: each for each in self.dimensions}, list[str]()
            names = [name for name in named if name in wanted]
            for name in chain(names, named):  # grows while it is gone through
                names += [
                    other for rule in self.all_rules if name in rule.over for other in rule.over if other not in names
                ]
            for name in dict.fromkeys((*names, *named)):
                behind = [name]  # that on which it depends, and so on
                while before := named[behind[0]].only.name:
                    behind.insert(0, before)
                found += [other for other in behind if other not in (*wanted, *found)]
            self._orders[wanted] = tuple(named[name] for name in found)
        return self._orders[wanted]

    def reason(self, pair: Iterable[ClassOf]) -> str:
        """Why no row holds both: where their dimensions have a say, or else the first rule that excludes them."""
        both, says = tuple(pair), list(self._says)
        if self.completed(both, rules=says):
            found = (rule.why for rule in self.rules if not self.completed(both, rules=(rule, *says)))
            return next(found, "several rules together")
        for say in self._says:
            less = [other for other in says if other is not say]
            says = says if self.completed(both, rules=less) else less
        return "; ".join(dict.fromkeys(say.why for say in says))

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules, and that a dimension has its say beside some classes of another alone; small ones first."""
        return tuple(sorted((*self._says, *self.rules), key=lambda rule: len(rule.over)))

    @cached_property
    def _says(self) -> tuple[Rule, ...]:
        def say(name: str, only: Only) -> Rule:
            over = (only.name, name)
            return Rule(only.why, over, lambda other, own: own == NOTHING or other in only.classes, always=True)

        return tuple(say(each.name, each.only) for each in self.dimensions if each.only.name)


def held(row: Row) -> Iterator[ClassOf]:
    """The classes of a row that have a say."""
    return ((name, label) for name, label in row.items() if label != NOTHING)
