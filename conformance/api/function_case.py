"""Cases as functions are asked them: one of an id, or those of a role and tier with some values. No torch by itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mla_conformance.backends.references import nearest
from mla_conformance.backends.roles import ROLES, Role
from mla_conformance.cases import covering, grammar, work
from mla_conformance.cases.case import Call, Case, CaseError
from mla_conformance.cases.fitting import fit
from mla_conformance.cases.space import Space
from mla_conformance.files.whole import InputError
from mla_conformance.vocabulary import arrays, capabilities
from mla_conformance.vocabulary.capabilities import Capability, Tier

if TYPE_CHECKING:
    import torch

CALLS: Mapping[Role, tuple[Call, ...]] = {
    Role.PREFILL: (Call.NEW_TOKENS, Call.CONTEXT_CHUNK),
    Role.DECODE: (Call.DECODE,),
    Role.SPARSE: (Call.SPARSE_DECODE,),
    Role.INDEXER: (Call.INDEX_LOGITS,),
}
"""The calls of a role that one function serves, since they have the same inputs."""
_WHY_NONE = {
    (Role.LAYER, Role.SPARSE_LAYER): "a layer keeps weights and a cache from call to call, which no function does; "
    "judge its kernels as functions, by role prefill and decode, or the class",
    (Role.TOPK, Role.PREPARE): "a top-k over logits, and the preparation of index queries and keys, are judged by the "
    "conventions that a class declares; judge a class",
    (Role.COMPRESS, Role.CACHE): "a cache operation is judged by what it writes into memory around its operands, which "
    "no result shows; judge a class",
    (Role.TREE,): "a tree's masks are in the metadata that a class is prepared with, so judge a class",
}
_CLASS = "mla-conformance certify --backend file.py:Class"
NO_FUNCTION = {role: f"{why}: {_CLASS}" for roles, why in _WHY_NONE.items() for role in roles}
AT_DEFAULT = (
    "dims", "dtype", "cache", "scales", "ranks", "out", "quant", "far", "length", "space", "repeats", "sink", "extra",
    "gathered",
)  # fmt: skip
"""Fields whose other values a backend has to declare, so that they stand for nothing that a kernel must support."""
_SHOWN = 24


@dataclass(frozen=True, repr=False)
class FunctionCase:
    """A case of the suite that a plain function can be asked."""

    suite_case: Case  # whose attributes are the fields of the id, such as ``suite_case.heads``

    @property
    def id(self) -> str:
        """The case id, which names the same inputs on every machine."""
        return self.suite_case.id

    def __str__(self) -> str:
        return self.id

    def __repr__(self) -> str:
        return f"mla.case({self.id!r})"

    def inputs(self, device: "str | torch.device" = "") -> dict[str, Any]:
        """Named tensors and numbers for one call; docs/python-api.md has the table of each role.

        They are new tensors each time, with the same values, on ``cpu``, ``cuda`` or one GPU as ``cuda:1``, by default
        on a GPU where there is one. Of a case that takes several calls it is an InputError: ``judge`` makes them.
        """
        from mla_conformance.api.kernels import hand_out

        return hand_out(self.suite_case, device)


class CaseSelection(tuple[FunctionCase, ...]):
    """Cases in the order of the suite; as a decorator, pytest's parametrisation of an argument ``case``."""

    # how many of the tier's lists are not among them, by the value that has to be named for it
    left_out: Mapping[str, int] = MappingProxyType({})

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        """The test with one item for each case, whose id is the case's."""
        import pytest

        return pytest.mark.parametrize("case", self, ids=str)(test)


def find_case(id: str) -> FunctionCase:
    """The case of an id, as reports print it; an InputError, which says what to do, if no function can be asked it."""
    try:
        found = Case.parse(id)
        reason = why_no_function(found)
    except (CaseError, capabilities.CapabilityError) as error:
        raise InputError(str(error)) from error
    if reason:
        raise InputError(f"{id}: {reason}")
    return FunctionCase(found)


def why_no_function(case: Case) -> str:
    """Why a function cannot be asked a case; empty if it can."""
    capability = capabilities.find_capability(case.capability)
    if case.role in NO_FUNCTION:
        return NO_FUNCTION[case.role]
    if capability.probes_refusals or capability.captures:
        return f"{capability.name} judges what a class declares; expected a function's case, or certify a class"
    return "it asks for merge_attn_states, which a class has; certify one" if case.own_merge else ""


def _meant(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"did you mean {near}?" if near else f"expected one of {', '.join(dict.fromkeys(known))}"


@dataclass(frozen=True)
class _Asked:
    """What was asked of one field, or of one dimension of the role's space."""

    name: str  # of the field
    values: tuple[object, ...]  # any of them will do; of a list of lengths, each length is one of them
    label_of: Callable[[Case], str | None]  # the class of a case; None where no dimension has the name

    @staticmethod
    def of(space: Space, listed: Sequence[Case], name: str, value: object) -> "_Asked":
        """What is asked by ``name=value``; an InputError of an unknown field, or a value that no listed case has."""
        labels = {each.name.replace(" ", "_"): each.class_of for each in space.dimensions}
        known = [*listed[0].defaults(), *labels]
        if name not in known:
            raise InputError(f"cases: unknown field {name!r} of a {space.role} case; {_meant(name, known)}")
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        asked = _Asked(name, values, labels.get(name, lambda case: None))
        for each in values:
            if any(_Asked(name, (each,), asked.label_of).holds(case, any) for case in listed):
                continue
            got = [getattr(case, name) for case in listed if getattr(case, name, None) is not None]
            parts = {part for each in got for part in (each if isinstance(each, tuple) else (each,))}
            shown = [grammar.format_value(part) for part in sorted(parts)]
            shown += sorted({str(label) for case in listed if (label := asked.label_of(case)) is not None} - set(shown))
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            expected = f"expected one of {', '.join(shown[:_SHOWN])}{more}"
            raise InputError(f"cases: no {space.role} case has {name}={each}; {expected}")
        return asked

    def holds(self, case: Case, lengths: Callable[[Iterable[bool]], bool] = all) -> bool:
        """Whether a case has one of the values, or its class is one of them; of its lengths all, or any."""
        got = getattr(case, self.name, None)
        among = got and lengths(each in self.values for each in got) if isinstance(got, tuple) else got in self.values
        texts = [str(value) for value in self.values if isinstance(value, str)]
        return bool(among) or (got is not None and grammar.format_value(got) in texts) or self.label_of(case) in texts


def select(role: str, tier: str, wanted: Mapping[str, object]) -> CaseSelection:
    """The cases of a role and tier with the wanted values, an InputError if none is; see ``mla_conformance.cases``."""
    if role in list(NO_FUNCTION):
        raise InputError(f"cases: {NO_FUNCTION[ROLES[role]]}")
    if role not in list(CALLS):
        raise InputError(f"cases: unknown role {role!r}; expected one of {', '.join(CALLS)}")
    space = next(space for space in arrays.SPACES.values() if space.role == role)
    if tier not in list(Tier):
        raise InputError(f"cases: unknown tier {tier!r}; {_meant(tier, Tier)}")
    size = Tier(tier)
    listed = dict[Capability, list[Case]]()
    for entry in capabilities.CAPABILITIES.values():
        if entry.name not in arrays.SPACES or arrays.SPACES[entry.name].role is space.role:
            some = entry.select(Tier.FULL if size is Tier.SMOKE else size)  # the smoke tier is chosen from all of them
            listed[entry] = [case for case in some if case.role is space.role and not why_no_function(case)]
    every = [case for cases in listed.values() for case in cases]
    asked = [_Asked.of(space, every, name, value) for name, value in wanted.items()]

    def fits(case: Case) -> bool:
        return all(each.holds(case) for each in asked) and not unusual(case, wanted) and not why_no_function(case)

    found, left_out = list[Case](), Counter[str]()
    for entry, cases in listed.items():
        fitting = list(filter(fits, cases))
        if entry.name not in arrays.SPACES:
            usual = capabilities.smoke_of(entry.name, cases) if size is Tier.SMOKE else cases
            lacking = [unusual(case, wanted) for case in usual if all(each.holds(case) for each in asked)]
            left_out.update(told[0] for told in lacking if told)
        elif cases and all(each.holds(cases[0]) for each in asked if each.name == "capability"):
            # As they are made for what a kernel declares: with every pair of classes among it.
            known, triples = capabilities.listed(space), capabilities.FITTED[size] if size is Tier.NIGHTLY else 0
            held, right = covering.Pairs(space, space.rows(known)), list(filter(fits, known))
            fitting += fit(space, right, lambda some: list(map(fits, some)), held, work.CPU_WORK, triples).cases
        # By the smoke tier's own rules: it would hold few of what is asked for.
        found += capabilities.smoke_of(entry.name, fitting, found) if size is Tier.SMOKE and fitting else fitting
    if found:
        selection = CaseSelection(map(FunctionCase, found))
        selection.left_out = left_out
        return selection
    together = ", ".join(f"{each.name}={'|'.join(map(str, each.values))}" for each in asked)
    lacking = [unusual(case, wanted) for case in every if all(each.holds(case) for each in asked)]
    if not lacking:
        raise InputError(f"cases: no {space.role} case has {together} at once; expected fewer values")
    more = min(lacking, key=len)
    expected = f"expected more values, such as {', '.join(more)}"
    raise InputError(f"cases: no {space.role} case has {together} and defaults otherwise; {expected}")


def unusual(case: Case, wanted: Mapping[str, object]) -> list[str]:
    """The fields of a case that nobody asked for, and that a kernel may lack: several calls, or what is declared."""
    usual = case.defaults()
    found = {name: getattr(case, name) for name in AT_DEFAULT if name in usual and getattr(case, name) != usual[name]}
    if not capabilities.counts(case.capability):
        found["capability"] = case.capability
    if case.call not in CALLS[case.role]:
        found["call"] = case.call
    return [f"{name}={grammar.format_value(value)}" for name, value in found.items() if name not in wanted]
