"""Which cases a function is asked: those of a role and tier, by values of fields or classes of the role. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_conformance.api.function_case import NO_FUNCTION, FunctionCase, why_no_function
from mla_conformance.backends.references import nearest
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.covering import Pairs
from mla_conformance.cases.fitting import fit
from mla_conformance.cases.grammar import format_value
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import is_light
from mla_conformance.files.whole import InputError
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Capability, Tier, counts, smoke_of
from mla_conformance.vocabulary.capabilities import listed as every_case

CALLS: Mapping[Role, tuple[Call, ...]] = {
    Role.PREFILL: (Call.NEW_TOKENS, Call.CONTEXT_CHUNK),
    Role.DECODE: (Call.DECODE,),
    Role.SPARSE: (Call.SPARSE_DECODE,),
    Role.INDEXER: (Call.INDEX_LOGITS,),
}
"""The calls of a role that one function serves, since they have the same inputs."""
AT_DEFAULT = (
    "dims", "dtype", "cache", "scales", "ranks", "out", "quant", "far", "length", "space", "repeats", "sink", "extra",
    "gathered",
)  # fmt: skip
"""Fields whose other values a backend has to declare, so that they stand for nothing that a kernel must support."""
_SHOWN = 24
_TIERS = f"expected one of {', '.join(Tier)}"


@dataclass(frozen=True)
class FieldFilter:
    """What was asked of one field, or of one dimension of the role's space."""

    name: str  # of the field
    values: tuple[object, ...]  # any of them will do; of a list of lengths, each length is one of them
    label_of: Callable[[Case], str | None]  # the class of a case; None where no dimension has the name

    @staticmethod
    def of(space: Space, listed: Sequence[Case], name: str, value: object) -> "FieldFilter":
        """What is asked by ``name=value``; an InputError of an unknown field, or a value that no listed case has."""
        labels = {each.name.replace(" ", "_"): each.class_of for each in space.dimensions}
        known = [*listed[0].defaults(), *labels]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"expected one of {', '.join(dict.fromkeys(known))}"
            raise InputError(f"cases: unknown field {name!r} of a {space.role} case; {hint}")
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        asked = FieldFilter(name, values, labels.get(name, lambda case: None))
        for each in values:
            if not any(FieldFilter(name, (each,), asked.label_of).holds(case, any) for case in listed):
                raise InputError(f"cases: no {space.role} case has {name}={each}; {asked.expected(listed)}")
        return asked

    def holds(self, case: Case, lengths: Callable[[Iterable[bool]], bool] = all) -> bool:
        """Whether a case has one of the values, or its class is one of them; of its lengths all, or any."""
        got = getattr(case, self.name, None)
        among = got and lengths(each in self.values for each in got) if isinstance(got, tuple) else got in self.values
        texts = [str(value) for value in self.values if isinstance(value, str)]
        return bool(among) or (got is not None and format_value(got) in texts) or self.label_of(case) in texts

    def expected(self, listed: Iterable[Case]) -> str:
        """The values that there are."""
        got = [getattr(case, self.name, None) for case in listed]
        parts = {part for each in got if each is not None for part in (each if isinstance(each, tuple) else (each,))}
        labels = {str(label) for case in listed if (label := self.label_of(case)) is not None}
        shown = [format_value(part) for part in sorted(parts)]
        shown += sorted(labels - set(shown))
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"expected one of {', '.join(shown[:_SHOWN])}{more}"


class CaseSelection(tuple[FunctionCase, ...]):
    """Cases in the order of the suite; as a decorator, pytest's parametrisation of an argument ``case``."""

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """The test with one item for each case, whose id is the case's."""
        import pytest

        return pytest.mark.parametrize("case", self, ids=str)(test)


def select(role: str, tier: str, wanted: Mapping[str, object]) -> CaseSelection:
    """The cases of a role and tier with the wanted values, an InputError if none is; see ``mla_conformance.cases``."""
    if role in list(NO_FUNCTION):
        raise InputError(f"cases: {NO_FUNCTION[ROLES[role]]}")
    if role not in list(CALLS):
        raise InputError(f"cases: unknown role {role!r}; expected one of {', '.join(CALLS)}")
    space = next(space for space in SPACES.values() if space.role == role)
    if tier not in list(Tier):
        meant = nearest(tier, Tier)
        raise InputError(f"cases: unknown tier {tier!r}; " + (f"did you mean {meant}?" if meant else _TIERS))
    size = Tier(tier)
    listed = dict[Capability, list[Case]]()
    for entry in CAPABILITIES.values():
        if entry.name not in SPACES or SPACES[entry.name].role is space.role:
            # The smoke tier is chosen from all of them.
            some = entry.select(Tier.FULL if size is Tier.SMOKE else size)
            listed[entry] = [case for case in some if case.role is space.role and not why_no_function(case)]
    every = [case for cases in listed.values() for case in cases]
    asked = [FieldFilter.of(space, every, name, value) for name, value in wanted.items()]

    def fits(case: Case) -> bool:
        return all(each.holds(case) for each in asked) and not _unusual(case, wanted) and not why_no_function(case)

    found: list[Case] = []
    for entry, cases in listed.items():
        fitting = list(filter(fits, cases))
        if entry.name in SPACES and cases:
            # As they are made for what a kernel declares: with every pair of classes among it.
            known, triples = every_case(space), size is Tier.NIGHTLY
            held = Pairs(space, space.rows(known))
            fitting += fit(space, known, lambda some: list(map(fits, some)), held, is_light, triples).cases
        # By the smoke tier's own rules: it would hold few of what is asked for.
        found += smoke_of(entry.name, fitting, found) if size is Tier.SMOKE and fitting else fitting
    if not found:
        having = [case for case in every if all(each.holds(case) for each in asked)]
        raise InputError(_none_left(space.role, asked, [_unusual(case, wanted) for case in having]))
    return CaseSelection(map(FunctionCase, found))


def _unusual(case: Case, wanted: Mapping[str, object]) -> dict[str, object]:
    """The fields of a case that nobody asked for, and that a kernel may lack: several calls, or what is declared."""
    usual = case.defaults()
    found = {name: getattr(case, name) for name in AT_DEFAULT if name in usual and getattr(case, name) != usual[name]}
    if not counts(case.capability):
        found["capability"] = case.capability
    if case.call not in CALLS[case.role]:
        found["call"] = case.call
    return {name: value for name, value in found.items() if name not in wanted}


def _none_left(role: Role, asked: Iterable[FieldFilter], lacking: Sequence[Mapping[str, object]]) -> str:
    """The sentence for values that no case has together; of those that have them, what else would have to be asked."""
    together = ", ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in asked)
    if not lacking:
        return f"cases: no {role} case has {together} at once; expected fewer values"
    nearest_one = ", ".join(f"{name}={format_value(value)}" for name, value in min(lacking, key=len).items())
    return f"cases: no {role} case has {together} and defaults otherwise; expected more values, such as {nearest_one}"
