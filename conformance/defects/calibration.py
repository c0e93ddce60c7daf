"""The diagnosis judged: known defects as failing backends, with themselves among the candidates, without, and mixed.

Mixed are two defects in one kernel, and a defect of one head or of one request beside an honest rest. A cause that is
told is right if it is the defect's own, one of the two, or gives the same numbers to the last one; of a defect that is
left out, one of its family.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.defects.candidates import Candidate, candidates
from mla_conformance.defects.diagnosis_report import Diagnosis, Outcome
from mla_conformance.defects.explain import ALIKE, MOST_TOLD, causes_of
from mla_conformance.defects.known import Judged, KnownDefect, known_defects
from mla_conformance.defects.layered import LayeredDecode
from mla_conformance.defects.likeness import Behaviour, likeness, numbers_of
from mla_conformance.defects.report import stored
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import ARITHMETIC
from mla_conformance.problems.operands import segments
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier

_Mixture = tuple[tuple[KnownDefect, ...], str, Behaviour]
"""The defects that are wholly in a kernel, the kind of mixture, and what it does."""
_MIXTURES = 4
"""Mixtures of a defect at most."""
_WORKERS = 2


def calibrate() -> list[Diagnosis]:
    """Every diagnosis of known defects and of mixtures, by cases in processes of their own."""
    groups: dict[str, list[str]] = defaultdict(list)
    known = stored().killing_cases
    for entry in known_defects().values():
        groups[known.get(entry.id) or _killing_case(entry)].append(entry.id)
    with ProcessPoolExecutor(_WORKERS, get_context("spawn"), initializer=partial(torch.set_num_threads, 1)) as pool:
        return [found for part in pool.map(diagnoses, groups, groups.values()) for found in part]


def _killing_case(entry: KnownDefect) -> str:
    """The first case of the expected capability that kills a defect."""
    context = Context()
    cases = (case for case in CAPABILITIES[entry.killed_by].select(Tier.FULL) if case.role in entry.roles)
    return next(case.id for case in cases if _tried(entry.reference, case, context)[1].failed)


def diagnoses(text: str, ids: Sequence[str]) -> list[Diagnosis]:
    """Of the defects that a case kills first."""
    return list(_OnCase(Case.parse(text)).diagnoses([known_defects()[id] for id in ids]))


def _tried(reference: str, case: Case, context: Context) -> tuple[Trial, Record]:
    name = reference.rpartition(":")[2]
    return judged_trial(Subject(BackendReference(name, reference), torch.device("cpu")), case, context)


class _OnCase:
    """One case, with what every candidate does on it."""

    def __init__(self, case: Case) -> None:
        self._case, self._context = case, Context()
        self._behaviours: dict[str, Behaviour] = {}
        self._random = random.Random(case.id)

    def diagnoses(self, entries: Sequence[KnownDefect]) -> Iterator[Diagnosis]:
        for entry in entries:
            trial, record = _tried(entry.reference, self._case, self._context)
            if record.check not in ARITHMETIC:
                yield Diagnosis(entry.id, "alone", Outcome.SAID)
                continue
            own = Behaviour.of(trial, record)
            yield self._diagnosis(entry.id, "alone", own, partial(_is_own, (entry,)))
            of_family = partial(_is_related, entry)
            yield self._diagnosis(entry.id, "left out", own, of_family, left_out=entry.id)
            for defects, kind, mixed in self._mixtures(entry, trial, own):
                yield self._diagnosis(entry.id, kind, mixed, partial(_is_own, defects))

    def _diagnosis(
        self,
        name: str,
        kind: str,
        seen: Behaviour,
        is_right: Callable[[Candidate], bool],
        left_out: str = "",
    ) -> Diagnosis:
        """What is told of a behaviour; ``is_right`` says so of a cause besides giving the same numbers."""
        found: list[Candidate] = []
        rejected, accepted = 0.0, 1.0
        for candidate in candidates(self._case.role):
            if candidate.id == left_out != "":
                continue
            share = likeness(seen, self._behaviour(candidate.reference))
            if share >= ALIKE:
                found.append(candidate)
                accepted = min(accepted, share)
            else:
                rejected = max(rejected, share)
        causes = causes_of(found)
        told = causes if len(causes) <= MOST_TOLD else []
        right = any(is_right(each) or (not left_out and self._is_same(seen, each)) for each in told)
        return Diagnosis(name, kind, Outcome.of(bool(told), right, seen.is_numeric), rejected, accepted)

    def _is_same(self, seen: Behaviour, candidate: Candidate) -> bool:
        return likeness(seen, self._behaviour(candidate.reference)) == 1.0

    def _behaviour(self, reference: str) -> Behaviour:
        if reference not in self._behaviours:
            self._behaviours[reference] = Behaviour.of(*_tried(reference, self._case, self._context))
        return self._behaviours[reference]

    def _mixtures(self, entry: KnownDefect, trial: Trial, own: Behaviour) -> Iterator[_Mixture]:
        """A few that fail."""
        for other in self._random.sample(list(known_defects().values()), _MIXTURES):
            kernel = _both(entry.kernel, other.kernel)
            if kernel and self._case.role in other.roles:
                made, record = _tried(f"{__name__}:{kernel.__name__}", self._case, self._context)
                if record.check in ARITHMETIC:
                    yield (entry, other), "two at once", Behaviour.of(made, record)
        honest, _ = _tried(_located(_HONEST[self._case.role]), self._case, self._context)
        if trial.last and honest.last and honest.last.problem.key == trial.last.problem.key:
            yield from (((), *blend) for blend in _blends(own, numbers_of(honest), trial))


def _is_own(entries: Sequence[KnownDefect], told: Candidate) -> bool:
    return any(entry.id in (told.id, *told.covers) for entry in entries)


def _is_related(entry: KnownDefect, told: Candidate) -> bool:
    return told.family == entry.family or entry.id in told.covers


_HONEST: dict[Role, type[Judged]] = {
    Role.PREFILL: EagerPrefillBackend,
    Role.DECODE: LayeredDecode,
    Role.LAYER: LayeredDecode,
    Role.SPARSE: EagerSparseBackend,
}


def _located(kernel: type) -> str:
    return f"{kernel.__module__}:{kernel.__name__}"


def _both(one: type[Judged], other: type[Judged]) -> type[Judged] | None:
    """A kernel with two defects, where its reference finds it; None if they do not combine."""
    if one is other or issubclass(one, other) or issubclass(other, one):
        return None
    try:
        kernel = type(f"{one.__name__}And{other.__name__}", (one, other), {"__module__": __name__})
    except TypeError:  # of different roles, or no order of their bases
        return None
    setattr(sys.modules[__name__], kernel.__name__, kernel)
    return kernel


def _blends(own: Behaviour, honest: Sequence[Measured], trial: Trial) -> Iterator[tuple[str, Behaviour]]:
    """The defect in the first head only, and in the last request only, where something is wrong there."""
    assert trial.last is not None
    last = list(segments(trial.last.expectation.rows.start_loc))[-1]
    for kind, rows, heads in (("one head", slice(None), slice(0, 1)), ("one request", last, slice(None))):
        pairs = zip(own.numbers, honest, strict=False)
        mixed = replace(own, numbers=tuple(_blend(wrong, right, rows, heads) for wrong, right in pairs))
        if len(own.numbers) == len(honest) and mixed.is_wrong:
            yield kind, mixed


def _blend(wrong: Measured, right: Measured, rows: slice, heads: slice) -> Measured:
    """The wrong numbers of these rows and heads among right ones; outputs are [T, N, V], LSEs [N, T]."""
    place = (rows, heads) if wrong.got.dim() == 3 else (heads, rows)
    got, allowed = right.got.clone(), right.allowed.clone()
    got[place], allowed[place] = wrong.got[place], wrong.allowed[place]
    return replace(wrong, got=got, allowed=allowed)
