"""Which cases a function is asked: those of a role and tier, by the values of their fields. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from mla_conformance.api.function_case import NO_LAYER, FunctionCase, why_no_function
from mla_conformance.backends.references import nearest
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.covering import choose
from mla_conformance.cases.grammar import format_value
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import CPU_WORK, work_of
from mla_conformance.files.inputs import InputError
from mla_conformance.vocabulary.arrays import SPACES
from mla_conformance.vocabulary.capabilities import (
    CAPABILITIES,
    Capability,
    CapabilityError,
    Tier,
    counts,
    find_tier,
    smoke_cases,
    with_killing,
)

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


@dataclass(frozen=True)
class CaseSelection(Sequence[FunctionCase]):
    """Cases in the order of the suite; as a decorator, pytest's parametrisation of an argument ``case``."""

    found: tuple[FunctionCase, ...]

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """The test with one item for each case, whose id is the case's."""
        import pytest

        return pytest.mark.parametrize("case", self.found, ids=str)(test)

    @overload
    def __getitem__(self, index: int) -> FunctionCase: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[FunctionCase]: ...
    def __getitem__(self, index: int | slice) -> FunctionCase | Sequence[FunctionCase]:
        """One case, or several."""
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)


def select(role: str, tier: str, wanted: Mapping[str, object]) -> CaseSelection:
    """The cases of a role and tier that have the wanted values; see ``mla_conformance.cases``.

    Raises:
        InputError: an unknown role, tier, field or value, or values that no case has together.
    """
    space = _space(role)
    try:
        size = find_tier(tier)
    except CapabilityError as error:
        raise InputError(f"cases: {error}") from error
    listed = {entry: _askable(entry, space.role, size) for entry in CAPABILITIES.values()}
    every = [case for cases in listed.values() for case in cases]
    asked = [_Asked.of(space, every, name, value) for name, value in wanted.items()]
    found: list[Case] = []
    for entry, cases in listed.items():
        fitting = [case for case in cases if all(each.holds(case) for each in asked) and _is_usual(case, wanted)]
        found += _few(entry, space, fitting, found) if size is Tier.SMOKE and fitting else fitting
    if not found:
        raise InputError(_none_left(space.role, asked, wanted))
    return CaseSelection(tuple(map(FunctionCase, found)))


def _space(role: str) -> Space:
    """The space of a role's cases."""
    if role == Role.LAYER:
        raise InputError(f"cases: {NO_LAYER}")
    if role not in list(CALLS):
        raise InputError(f"cases: unknown role {role!r}; expected one of {', '.join(CALLS)}")
    return next(space for space in SPACES.values() if space.role == role)


def _askable(entry: Capability, role: Role, tier: Tier) -> list[Case]:
    """The cases of a capability and role that a function can be asked; of the smoke tier those it is chosen from."""
    if entry.is_array and SPACES[entry.name].role is not role:
        return []
    cases = entry.select(Tier.FULL if tier is Tier.SMOKE else tier)
    return [case for case in cases if case.role is role and not why_no_function(case)]


def _few(entry: Capability, space: Space, fitting: Sequence[Case], before: Iterable[Case]) -> Sequence[Case]:
    """What the smoke tier takes of those that fit, by its own rules: it would hold few of what is asked for."""
    if not entry.is_array:
        return smoke_cases(fitting)
    light = [case for case in fitting if work_of(case) <= CPU_WORK] or fitting
    chosen = choose([space.row_of(case) for case in light], map(space.row_of, before))
    return with_killing(fitting, {light[number] for number in chosen})


def _is_usual(case: Case, wanted: Mapping[str, object]) -> bool:
    """Whether everything that was not asked for is as every kernel has it: one call, and nothing to be declared."""
    usual = case.defaults()
    declared = (name for name in AT_DEFAULT if name in usual and name not in wanted)
    return (
        ("capability" in wanted or counts(case.capability))
        and ("call" in wanted or case.call in CALLS[case.role])
        and all(getattr(case, name) == usual[name] for name in declared)
    )


@dataclass(frozen=True)
class _Asked:
    """What was asked of one field, or of one dimension of the role's space.

    Attributes:
        name: of the field.
        values: any of them will do; of a list of lengths, each length is one of them.
        label_of: the class of a case; None where no dimension has the name.
    """

    name: str
    values: tuple[object, ...]
    label_of: Callable[[Case], str | None]

    @staticmethod
    def of(space: Space, listed: Sequence[Case], name: str, value: object) -> "_Asked":
        """What is asked by ``name=value``; each value must be one that some case has.

        Raises:
            InputError: an unknown field, or a value that no listed case has.
        """
        labels = {each.name.replace(" ", "_"): each.class_of for each in space.dimensions}
        known = [*listed[0].defaults(), *labels]
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f"expected one of {', '.join(dict.fromkeys(known))}"
            raise InputError(f"cases: unknown field {name!r} of a {space.role} case; {hint}")
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        asked = _Asked(name, values, labels.get(name, lambda case: None))
        for each in values:
            if not any(_Asked(name, (each,), asked.label_of).touches(case) for case in listed):
                raise InputError(f"cases: no {space.role} case has {name}={each}; {asked.expected(listed)}")
        return asked

    def holds(self, case: Case) -> bool:
        """Whether a case has one of the values, or its class is one of them."""
        got = getattr(case, self.name, None)
        lengths = got if isinstance(got, tuple) else ()
        each = bool(lengths) and all(length in self.values for length in lengths)
        return each or self._is(case, got)

    def touches(self, case: Case) -> bool:
        """Whether a case has one of the values at all, if only as one length among others."""
        got = getattr(case, self.name, None)
        return self._is(case, got) or (isinstance(got, tuple) and any(length in self.values for length in got))

    def _is(self, case: Case, got: object) -> bool:
        texts = [str(value) for value in self.values if isinstance(value, str)]
        plain = not isinstance(got, tuple) and got in self.values
        return plain or (got is not None and format_value(got) in texts) or self.label_of(case) in texts

    def expected(self, listed: Iterable[Case]) -> str:
        """The values that there are."""
        got = [getattr(case, self.name, None) for case in listed]
        parts = {part for each in got if each is not None for part in (each if isinstance(each, tuple) else (each,))}
        labels = {str(label) for case in listed if (label := self.label_of(case)) is not None}
        shown = [format_value(part) for part in sorted(parts)]
        shown = [*shown, *sorted(labels - set(shown))]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return f"expected one of {', '.join(shown[:_SHOWN])}{more}"


def _none_left(role: Role, asked: Iterable[_Asked], wanted: Mapping[str, object]) -> str:
    """The sentence for values that no case has together."""
    together = ", ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in asked)
    left = ", ".join(name for name in ("call", *AT_DEFAULT) if name not in wanted)
    return (
        f"cases: no {role} case has {together}; expected fewer values, or values of the fields that are at "
        f"their default where they are not named: {left}"
    )
