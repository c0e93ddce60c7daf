"""The capability vocabulary: what can be right or wrong about a backend, with clauses and cases. No torch."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from mla_conformance.cases import grammar
from mla_conformance.cases.case import Call, Case, CaseError, parse_fields
from mla_conformance.cases.space import Space
from mla_conformance.cases.work import CPU_WORK, LARGE_CPU_WORK, work_of
from mla_conformance.files.whole import InputError, decode, read_text, write_whole
from mla_conformance.version import SUITE_VERSION, Version, numbers_of
from mla_conformance.vocabulary.arrays import SPACES, array_of

_OF_A_CASE = 5e7  # work that goes with any case, however small
_LONG = "many_batches"  # the procedure of so many calls that the smoke tier has one case of it alone
DUE_ON_GPU = "due on a GPU"  # what the reason begins with why a CPU is not asked for a case
CONFORMS = "conforms"  # the procedure of one call, judged


def smoke_of(capability: str, cases: Sequence[Case], before: Iterable[Case] = ()) -> tuple[Case, ...]:
    """What the smoke tier takes of some cases of a capability, in their order; those that kill in any case.

    Of a covering array few of those that a CPU is asked for, which with the cases ``before`` hold every class; else the
    first one, and the first of each role of which none kills.
    """
    if capability in SPACES:
        space, light = SPACES[capability], [case for case in cases if work_of(case) <= CPU_WORK] or cases
        classes = {case: space.classes_of(case) for case in light}
        costs = {case: _OF_A_CASE + work_of(case) for case in light}
        taken, missing = set[Case](), set(chain.from_iterable(classes.values()))
        missing.difference_update(*map(space.classes_of, before))
        while missing:
            best = max(light, key=lambda case: len(missing & classes[case]) / costs[case])
            taken.add(best)
            missing -= classes[best]
    else:
        known = {case.role for case in cases if case.id in killing()}
        alone = find_capability(capability).procedure == _LONG
        first = {case.role: case for case in reversed(cases) if case.role not in known and not alone}
        taken = {*cases[:1], *first.values()}
    return tuple(case for case in cases if case in taken or case.id in killing())


@cache
def killing() -> frozenset[str]:
    text = (files("mla_conformance.fixtures") / "defects.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text)["killing_cases"].values())


class CapabilityError(InputError):
    """An unknown capability or tier, or an entry that is wrong."""


class Tier(StrEnum):
    SMOKE = "smoke"  # the first case of each capability, those that kill known defects, every class of what is combined
    FULL = "full"  # all cases; they hold every pair of these values, and some triples of what a backend declares
    NIGHTLY = "nightly"  # those, long contexts, and more of these triples

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise CapabilityError(f"unknown tier '{value}'; expected one of {', '.join(cls)}")


FITTED = {Tier.FULL: 100, Tier.NIGHTLY: 500}
"""The most cases of a role that are fitted to a kernel behind its pairs: its grid, dense batches, triples."""


@dataclass(frozen=True)
class Capability:
    name: str  # as in ids, markers and reports
    clause: str  # clause of SPEC.md that the definition rests on
    definition: str  # one sentence
    lists: tuple[str, ...] = ()  # the names of lists of its cases; none where they are a covering array
    procedure: str = CONFORMS  # what is done with a backend, by its name in ``trials/procedures.py``
    probes_refusals: bool = False  # also run what the backend declares unsupported, which it must refuse
    needs: str = ""  # the attribute of a declaration without which it is unsupported; empty if there is none
    needs_cuda: bool = False  # there is nothing to judge on another device
    large: bool = False  # its cases take much of a device; a CPU is asked for those that it has done in seconds
    captures: bool = False  # a GPU captures the calls in a graph, if the backend declares that it may

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        if self.name in SPACES:
            return array_of(self.name)
        return tuple(case for case, _, until in self._listed if not until)

    @cached_property
    def _listed(self) -> list[tuple[Case, Version, Version]]:
        found = list[tuple[Case, Version, Version]]()
        for name in self.lists:  # of a role, or of those that several roles share
            role, _, own = name.rpartition(".")
            known = lists_of(role)
            if own not in known:
                raise CapabilityError(f"unknown list {name!r} in capabilities.toml; expected one of {', '.join(known)}")
            found += [(Case.of(capability=self.name, **fields), since, until) for fields, since, until in known[own]]
        return found

    @cached_property
    def added(self) -> dict[Case, Version]:
        """The cases with which the suite's list did not begin, each with the version that added it."""
        return {case: since for case, since, until in self._listed if _of_this_suite(since) and not until}

    @property
    def first_cases(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case not in self.added)

    @cached_property
    def smoke(self) -> tuple[Case, ...]:
        before = counted(SPACES[self.name], Tier.SMOKE) if self.name in SPACES else ()
        return smoke_of(self.name, self.cases, before)

    def select(self, tier: Tier) -> tuple[Case, ...]:
        if tier is Tier.SMOKE:
            return self.smoke
        further = (case for case in long_contexts() if case.capability == self.name) if tier is Tier.NIGHTLY else ()
        return (*self.cases, *further)


def _of_this_suite(version: Version) -> bool:
    return version[:2] == numbers_of(SUITE_VERSION)


_OUTSIDE: dict[str, str] = {}  # the lists of roles from outside


@cache
def lists_of(role: str) -> dict[str, list[tuple[grammar.Fields, Version, Version]]]:
    """The lists in a role's ``cases.txt``, by name; without one those that several roles share.

    Behind fields stand the versions that added and that withdrew them, empty if none did.
    """
    found: dict[str, list[tuple[grammar.Fields, Version, Version]]] = {}
    folder = f"roles.{role}" if role else "vocabulary"
    text = _OUTSIDE.get(role)
    if text is None:
        text = (files(f"mla_conformance.{folder}") / "cases.txt").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("["):
            found[line.strip("[]")] = []
        elif case := line.partition("#")[0].strip():
            try:
                found[[*found][-1]].append(_parsed(case))
            except (CaseError, IndexError) as error:
                raise CaseError(f"cases.txt in {folder}, line {number}: {error}") from error
    return found


def _parsed(line: str) -> tuple[grammar.Fields, Version, Version]:
    case, added, versions = line.partition(" +")
    if added and not re.fullmatch(r"\d+\.\d+\.\d+( -\d+\.\d+\.\d+)?", versions):
        expected = "+YEAR.N.PATCH, the version that adds the case, and -YEAR.N.PATCH behind it if one withdraws it"
        raise CaseError(f"expected {expected}, got {added.strip()}{versions}")
    since, _, until = versions.partition(" -")
    return parse_fields(case.strip()), numbers_of(since), numbers_of(until)


def _entries(text: str) -> dict[str, Capability]:
    parsed = tomllib.loads(text).items()
    return {name: Capability(name, lists=tuple(entry.pop("cases", ())), **entry) for name, entry in parsed}


CAPABILITIES = _entries((files("mla_conformance.vocabulary") / "capabilities.toml").read_text(encoding="utf-8"))
_OF_THE_SUITE = tuple(CAPABILITIES)


def usual_capabilities() -> tuple[str, ...]:
    """What is asked where none is named: those of roles from outside, if there are any, or else all."""
    return tuple(name for name in CAPABILITIES if name not in _OF_THE_SUITE) or _OF_THE_SUITE


def add_role(space: Space, lists: str, capabilities: str) -> Iterable[Capability]:
    """Take up the space of a role from outside, its lists as in a ``cases.txt``, and its entries; else ValueError."""
    entries = _entries(capabilities)
    if taken := [name for name in entries if name in CAPABILITIES]:
        raise CapabilityError(f"capability {taken[0]}: the name is taken")
    if space.capability not in entries:
        raise CapabilityError(f"expected an entry of {space.capability}, whose cases hold every pair of classes")
    SPACES[space.capability], _OUTSIDE[space.role] = space, lists
    CAPABILITIES.update(entries)
    return entries.values()


def counted(space: Space, tier: Tier) -> Iterator[Case]:
    """The listed cases of a role that are judged by one right call anywhere, as those of its array are."""
    for entry in CAPABILITIES.values():
        if counts(entry.name) and entry.name not in SPACES:
            yield from (case for case in entry.select(tier) if case.role is space.role)


def counts(capability: str) -> bool:
    entry = find_capability(capability)
    return entry.procedure == CONFORMS and not (entry.needs_cuda or entry.large)


def is_due_on_gpu(case: Case) -> bool:
    """Whether a CPU is not asked for a case: it is of a covering array, or of what is large, and takes long there."""
    entry = find_capability(case.capability)
    if entry.large:
        return case.far.startswith("rows") or work_of(case) > LARGE_CPU_WORK
    return entry.name in SPACES and work_of(case) > CPU_WORK


def listed(space: Space) -> tuple[Case, ...]:
    """The cases of a role that everybody is asked, as far as they count: those of the lists and of the array."""
    return (*counted(space, Tier.FULL), *array_of(space.capability))


@cache
def long_contexts() -> tuple[Case, ...]:
    """Of the nightly tier, of the capabilities that their calls are named after."""
    listed = lists_of("")["long_contexts"]
    return tuple(Case.of(capability=fields.get("call", Call.NEW_TOKENS), **fields) for fields, *_ in listed)


@cache
def first_cases() -> tuple[Case, ...]:
    return tuple(chain.from_iterable(entry.first_cases for entry in CAPABILITIES.values()))


@cache
def added_cases() -> dict[Case, Version]:
    """What was added to that list since, by id, each with the version that did; `+VERSION` ends its line."""
    found = chain.from_iterable(entry.added.items() for entry in CAPABILITIES.values())
    return dict(sorted(found, key=lambda pair: pair[0].id))


@cache
def withdrawn_cases() -> dict[Case, tuple[Version, Version]]:
    """What a version added and a later one withdrew, since a right kernel failed it: `-VERSION` behind `+VERSION`."""
    listed = chain.from_iterable(entry._listed for entry in CAPABILITIES.values())
    return {case: (since, until) for case, since, until in listed if until and _of_this_suite(since)}


def find_capability(name: str) -> Capability:
    if name not in CAPABILITIES:
        raise CapabilityError(f"unknown capability '{name}'; expected one of {', '.join(CAPABILITIES)}")
    return CAPABILITIES[name]


class _CaseFile(msgspec.Struct):
    case: dict[str, bool | int | str | tuple[int, ...]]
    id: str


def read_case(path: Path) -> Case:
    file = decode(read_text(path), _CaseFile, str(path))
    try:
        case = Case.from_json(file.case)
        find_capability(case.capability)
    except (CaseError, CapabilityError) as error:
        raise InputError(f"{path}: {error}") from error
    if file.id != case.id:
        raise InputError(f"{path}: expected id {case.id!r} as the fields give it, got {file.id!r}")
    return case


def read_cases(folder: Path) -> tuple[Case, ...]:
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    cases = {case.id: case for case in map(read_case, sorted(folder.glob("*.json")))}
    if not cases:
        raise InputError(f"{folder}: no case file (*.json)")
    return tuple(cases.values())


def write_case(path: Path, case: Case, observed: Mapping[str, Any] | None = None) -> None:
    """Write a case into a file of its own, with its folder; what else is ``observed`` is for people, not read back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"id": case.id, "case": case.to_json(), **({"observed": observed} if observed else {})}
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
