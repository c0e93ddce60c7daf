"""Which cases a function is asked: those of a role and tier, by the values of their fields. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from mla_conformance.api.field_filter import FieldFilter
from mla_conformance.api.function_case import NO_FUNCTION, FunctionCase, why_no_function
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.covering import Pairs, choose
from mla_conformance.cases.fitting import fit
from mla_conformance.cases.grammar import format_value
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import CPU_WORK, is_light, work_of
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
    asked = [FieldFilter.of(space, every, name, value) for name, value in wanted.items()]
    found: list[Case] = []

    def fits(case: Case) -> bool:
        return _holds(case, asked) and not _unusual(case, wanted) and not why_no_function(case)

    for entry, cases in listed.items():
        fitting = [*filter(fits, cases), *(_fitted(space, fits, size) if entry.is_array and cases else ())]
        found += _few(entry, space, fitting, found) if size is Tier.SMOKE and fitting else fitting
    if not found:
        raise InputError(
            _none_left(space.role, asked, [_unusual(case, wanted) for case in every if _holds(case, asked)])
        )
    return CaseSelection(tuple(map(FunctionCase, found)))


def _space(role: str) -> Space:
    """The space of a role's cases."""
    if role in list(NO_FUNCTION):
        raise InputError(f"cases: {NO_FUNCTION[Role(role)]}")
    if role not in list(CALLS):
        raise InputError(f"cases: unknown role {role!r}; expected one of {', '.join(CALLS)}")
    return next(space for space in SPACES.values() if space.role == role)


def _askable(entry: Capability, role: Role, tier: Tier) -> list[Case]:
    """The cases of a capability and role that a function can be asked; of the smoke tier those it is chosen from."""
    if entry.is_array and SPACES[entry.name].role is not role:
        return []
    cases = entry.select(Tier.FULL if tier is Tier.SMOKE else tier)
    return [case for case in cases if case.role is role and not why_no_function(case)]


def _fitted(space: Space, fits: Callable[[Case], bool], tier: Tier) -> Sequence[Case]:
    """Cases for what is asked, as they are made for what a kernel declares: with every pair of classes among it."""
    cases = every_case(space)
    light = is_light if tier is Tier.NIGHTLY else None
    return fit(space, cases, lambda some: list(map(fits, some)), Pairs(space, map(space.row_of, cases)), light).cases


def _few(entry: Capability, space: Space, fitting: Sequence[Case], before: Iterable[Case]) -> Sequence[Case]:
    """What the smoke tier takes of those that fit, by its own rules: it would hold few of what is asked for."""
    if not entry.is_array:
        return smoke_cases(fitting)
    light = [case for case in fitting if work_of(case) <= CPU_WORK] or fitting
    chosen = choose([space.row_of(case) for case in light], map(space.row_of, before))
    return with_killing(fitting, {light[number] for number in chosen})


def _unusual(case: Case, wanted: Mapping[str, object]) -> dict[str, object]:
    """The fields of a case that nobody asked for, and that a kernel may lack: several calls, or what is declared."""
    usual = case.defaults()
    found = {name: getattr(case, name) for name in AT_DEFAULT if name in usual and getattr(case, name) != usual[name]}
    if not counts(case.capability):
        found["capability"] = case.capability
    if case.call not in CALLS[case.role]:
        found["call"] = case.call
    return {name: value for name, value in found.items() if name not in wanted}


def _holds(case: Case, asked: Iterable[FieldFilter]) -> bool:
    return all(each.holds(case) for each in asked)


def _none_left(role: Role, asked: Iterable[FieldFilter], lacking: Sequence[Mapping[str, object]]) -> str:
    """The sentence for values that no case has together, or none that is otherwise at its default.

    Args:
        role: of the cases.
        asked: the values.
        lacking: of each case that has them, what else would have to be asked for.
    """
    together = ", ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in asked)
    if not lacking:
        return f"cases: no {role} case has {together} at once; expected fewer values"
    nearest_one = ", ".join(f"{name}={format_value(value)}" for name, value in min(lacking, key=len).items())
    return f"cases: no {role} case has {together} and defaults otherwise; expected more values, such as {nearest_one}"
