"""The capability vocabulary: what can be right or wrong about a backend, with definitions, clauses and cases.

Adding a capability is one entry in ``capabilities.toml``; if none of the procedures fits, one more in
``trials/procedures.py``. No torch: cases are listed without it.
"""

import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from importlib.resources import files
from itertools import chain

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.combinations import PAIRS, TRIPLES, Space
from mla_conformance.cases.grammar import Fields
from mla_conformance.roles.decode.space import DECODE
from mla_conformance.roles.layer.space import LAYER
from mla_conformance.roles.prefill.space import PREFILL
from mla_conformance.roles.sparse.space import SPARSE
from mla_conformance.vocabulary import lists

_FIRST = 2


def smoke_cases(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The first cases, the first of each role, since a decode has its laws too, and those that kill; in their order."""
    first = {case.role: case for case in reversed(cases)}
    return with_killing(cases, (*cases[:_FIRST], *first.values()))


def with_killing(cases: Sequence[Case], taken: Collection[Case]) -> tuple[Case, ...]:
    """The cases that are taken anyway and those that kill; in their order."""
    return tuple(case for case in cases if case in taken or case.id in _killing())


@cache
def _killing() -> frozenset[str]:
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text)["killing_cases"].values())


class Tier(StrEnum):
    """How many of the cases are run."""

    SMOKE = "smoke"
    """The first cases of each capability, those that killed known defects, and every value of what is combined."""
    FULL = "full"
    """All cases; they hold every pair of these values."""
    NIGHTLY = "nightly"
    """Those and every triple, and long contexts."""


class CapabilityError(ValueError):
    """An unknown capability or tier."""


@dataclass(frozen=True)
class Capability:
    """One entry of the vocabulary.

    Attributes:
        name: as in ids, markers and reports.
        clause: clause of SPEC.md that the definition rests on.
        definition: one sentence.
        cases: the cases that decide it, the most telling first.
        smoke: those of them that the smoke tier takes.
        procedure: what is done with a backend, by its name in ``trials/procedures.py``.
        probes_refusals: also run what the backend declares unsupported, which it must refuse.
        needs: the attribute of a declaration without which it is unsupported; empty if there is none.
        needs_cuda: there is nothing to judge on another device.
        captures: a GPU captures the calls in a graph, if the backend declares that it may.
    """

    name: str
    clause: str
    definition: str
    cases: tuple[Case, ...]
    smoke: tuple[Case, ...]
    procedure: str = "conforms"
    probes_refusals: bool = False
    needs: str = ""
    needs_cuda: bool = False
    captures: bool = False

    @property
    def profile(self) -> str:
        """What it asks of a device, in the names of must-pass profiles; empty if nothing."""
        return "graph" if self.captures else "cuda" if self.needs_cuda else ""

    def select(self, tier: Tier) -> tuple[Case, ...]:
        """The cases of a tier."""
        if tier is Tier.SMOKE:
            return self.smoke
        return self.cases if tier is Tier.FULL else (*self.cases, *nightly_cases(self.name))


def _vocabulary() -> Iterator[Capability]:
    """The entries of the table, each with its cases made."""
    table = (files("mla_conformance.vocabulary") / "capabilities.toml").read_text(encoding="utf-8")
    for name, entry in tomllib.loads(table).items():
        made = chain.from_iterable(_case_list(function)() for function in entry.pop("cases"))
        cases = tuple(Case.of(capability=name, **fields) for fields in made)
        yield Capability(name, cases=cases, smoke=smoke_cases(cases), **entry)


def _case_list(name: str) -> Callable[[], Iterable[Fields]]:
    """A function of a role's lists, or of those that several roles share."""
    role, _, function = name.rpartition(".")
    module = import_module(f"mla_conformance.roles.{Role(role)}.lists") if role else lists
    made: Callable[[], Iterable[Fields]] = getattr(module, function)
    return made


_VOCABULARY = tuple(_vocabulary())
_LISTED = [case for entry in _VOCABULARY for case in entry.cases]
_LISTED_SMOKE = [case for entry in _VOCABULARY for case in entry.smoke]


def _together(space: Space, clause: str, definition: str) -> Capability:
    pairs = space.further_cases(_LISTED, PAIRS)
    smoke = with_killing(pairs, space.telling_cases(pairs, _LISTED_SMOKE))
    return Capability(space.capability, clause, definition, pairs, smoke)


# The last, since they show that something fails together with others, where any other capability says what it is.
_COMBINED = (
    _together(PREFILL, "3.1", "What other capabilities vary one by one is computed right together."),
    _together(DECODE, "6.2", "What other capabilities vary one by one is computed right together, of a decode."),
    _together(LAYER, "6.7", "What other capabilities vary one by one is computed right together, of a layer."),
    _together(SPARSE, "7.2", "What other capabilities vary one by one is computed right together, of selected keys."),
)

SPACES: dict[str, Space] = {space.capability: space for space in (PREFILL, DECODE, LAYER, SPARSE)}

CAPABILITIES: dict[str, Capability] = {entry.name: entry for entry in (*_VOCABULARY, *_COMBINED)}


def nightly_cases(capability: str) -> tuple[Case, ...]:
    """What the nightly tier adds to a capability's cases."""
    if capability in SPACES:
        return _triples(capability)
    return tuple(case for case in lists.LONG_CONTEXTS if case.capability == capability)


@cache
def _triples(capability: str) -> tuple[Case, ...]:
    return SPACES[capability].further_cases([case for entry in CAPABILITIES.values() for case in entry.cases], TRIPLES)


def find_capability(name: str) -> Capability:
    """The entry of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in CAPABILITIES:
        raise CapabilityError(f"unknown capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[name]


def find_tier(name: str) -> Tier:
    """The tier of this name.

    Raises:
        CapabilityError: there is none; the message lists the names.
    """
    if name not in list(Tier):
        raise CapabilityError(f"unknown tier '{name}'; expected one of {', '.join(Tier)}")
    return Tier(name)
