"""What a failure looks like: the failed trial beside what every candidate makes of the same case.

Told is what alone fits every judged number, with a "perhaps" if it does not hold on cases nearby, which tell it from
narrower mistakes: codes without their scale look the same whether that is so of every page or of large ones.
"""

import fnmatch
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from mla_conformance.backends import eager, eager_tree, foreign, references
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.roles import Role, role_of
from mla_conformance.cases.case import Case
from mla_conformance.cases.work import simpler, work_of
from mla_conformance.defects.bases import LayeredDecode
from mla_conformance.defects.known import Emulation, judged_roles, known_defects, reported_bugs
from mla_conformance.diagnosis.reach import Behaviour, likeness
from mla_conformance.diagnosis.suspects import TOLD, suspects
from mla_conformance.driving.driver import Executor, StepResult, run_step
from mla_conformance.judging.record import COMPARED, INDISTINCT, UNCOMPARED, UNLIKE, Record, Status
from mla_conformance.problems.memory import out_of_memory
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial, judged_trial
from mla_conformance.vocabulary.capabilities import find_capability

ALIKE = 0.99
"""Least likeness that is told: in the calibration another fault reached 0.987, and what was the same 0.997 at least."""
UNALIKE = 0.9
"""Least likeness of a candidate of which nothing is told: in short rows the same mistake came out as 0.984, because a
wrong row may round more than the right one's budget allows."""
PATIENCE = 15.0
"""Seconds for all candidates, and as many for cases nearby. All seconds here are CPU time of the thread that compares:
others may share the machine, and threads of torch that wait for each other on it count as if they computed."""
WHOLE = 120.0  # the same where nothing but this one failure is looked at: most cases take a tenth of it
_MOST_REQUESTS = 256  # the candidates take one request after the other
_PERHAPS = "perhaps "
_LISTED = 12

_BASES = (eager.EagerPrefillBackend, EagerDecodeBackend, eager_tree.EagerTreeBackend, LayeredDecode, EagerSparseBackend)
"""What a wrong step of the softmax stands before: a kernel of each role, and the decode of a layer."""

# Nobody knows who wrote what is imported or read once judging has begun.
known_defects()
reported_bugs()


@dataclass(frozen=True)
class Candidate:
    sentence: str  # what is wrong with it
    kernel: type[Emulation]
    roles: tuple[Role, ...]  # that it is judged in
    id: str = ""  # of a known defect; empty for a suspect
    sources: tuple[str, ...] = ()  # public threads that report it
    covers: tuple[str, ...] = ()  # known defects that are this mistake under some condition

    @property
    def reference(self) -> str:
        return f"{self.kernel.__module__}:{self.kernel.__name__}"

    @property
    def reported(self) -> str:
        """What a failure that looks like it is said to be; the numbers of a known defect are those of that defect."""
        source = self.sources[0] if self.sources else ""
        if self.id:
            return f"what the known defect {self.id}{f' ({source})' if source else ''} does: {self.sentence}"
        return self.sentence + (f", like {source}" if source else "")


@cache
def candidates(role: Role) -> tuple[Candidate, ...]:
    return tuple(candidate for candidate in _everyone() if role in candidate.roles)


@cache
def _everyone() -> tuple[Candidate, ...]:
    # Who touches memory by its address returns what is right, so that no wrong number looks like it; and the address of
    # a GPU's memory, read by this process, would end it.
    known = {id: entry for id, entry in known_defects().items() if entry.killed_by != "memory_bounds"}
    found = list[Candidate]()
    for wrong in suspects():
        told = next(each.__name__ for each in wrong.__mro__ if each.__name__ in TOLD["sentences"])
        covers = tuple(id for each in TOLD["covers"].get(told, "").split() for id in fnmatch.filter(known, each))
        sentence, sources = TOLD["sentences"][told], known[covers[0]].sources if covers else ()
        if issubclass(wrong, eager.EagerPrefillBackend | EagerDecodeBackend | EagerSparseBackend):
            found.append(Candidate(sentence, wrong, judged_roles(wrong), "", sources, covers))
            continue
        prefill: Any = None
        for base in _BASES:  # a kernel that is both classes, where its reference finds it
            module, name = wrong.__module__, wrong.__name__ + base.__name__
            role, parts = (Role.LAYER, {"prefill_backend": prefill}) if base is LayeredDecode else (role_of(base), {})
            kernel: Any = type(name, (wrong, base), {"__module__": module, **parts})
            prefill = prefill or kernel
            setattr(sys.modules[module], name, kernel)
            found.append(Candidate(sentence, kernel, (role,), "", sources, covers))
    for id, entry in known.items():
        found.append(Candidate(entry.sentence, entry.kernel, judged_roles(entry.kernel), id, entry.sources))
    return tuple(found)


class _Unwatched(Executor):
    """Carries out steps in this process while somebody else looks at what they leave: once, behind all of them."""

    def query(self, question: Callable[[], Any], kind: Any = None) -> StepResult:
        try:
            return StepResult(question())
        except Exception as error:
            return StepResult(error=foreign.one_line(error), out_of_memory=out_of_memory(error))


_UNWATCHED = _Unwatched()


def attempted(reference: str, case: Case, context: Context, device: torch.device) -> tuple[Trial, Record]:
    """The trial and the record of one of the project's own kernels; a RuntimeError once it has lost the GPU."""
    backend = references.BackendReference(reference.rpartition(":")[2], reference)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # they wait for each other over small tensors, on a busy machine longer than one computes
    try:
        done = run_step(partial(judged_trial, Subject(backend, device, _UNWATCHED), case, context))
        if done.error or done.disturbed:
            return judged_trial(Subject(backend, device), case, context)
    finally:
        torch.set_num_threads(before)
    tried: tuple[Trial, Record] = done.value
    if tried[1].failed and _UNWATCHED.lost(device):
        raise RuntimeError(f"{reference} lost the GPU on {case.id}, so that nothing more can be compared there")
    return tried


def neighbours(case: Case) -> list[Case]:
    """The boldest simpler case of each field, and those of the capability that differ in fewest; light ones first."""
    steps: dict[tuple[str, ...], Case] = {}
    for step in simpler(case):
        steps.setdefault(_differing(step, case), step)
    listed = (each for each in find_capability(case.capability).cases if each.role is case.role and each != case)
    nearest = sorted(listed, key=lambda each: (len(_differing(each, case)), work_of(each)))[:_LISTED]
    return sorted({*steps.values(), *nearest}, key=lambda each: (work_of(each), each.id))


def _differing(one: Case, other: Case) -> tuple[str, ...]:
    return tuple(name for name in one.defaults() if getattr(one, name) != getattr(other, name))


def outcome(record: Record) -> str | None:
    """The check of numbers that failed, nothing if the case passed; None if a record tells neither."""
    return record.check if record.status is Status.PASS or record.check in COMPARED else None


@dataclass(frozen=True)
class Failure:
    """A failure that is compared with known ones, which need not happen in the process that judged it."""

    record: Record  # of the case
    observed: Behaviour  # what the backend did on it
    device: torch.device  # where it was judged, and candidates are
    context: Context  # what the comparing process has made before
    nearby: Callable[[Case], str | None]  # the outcome of the backend on another case; None if that is not known
    # what the backend does on another case; None if that is not known
    again: Callable[[Case], "Failure | None"] = lambda case: None

    @property
    def case(self) -> Case:
        return Case.parse(self.record.case)

    @staticmethod
    def of(trial: Trial, record: Record) -> "Failure":
        """That of a trial of this process, whose last observation is compared."""

        def tried(case: Case) -> tuple[Trial, Record]:
            other, found = judged_trial(trial.subject, case, trial.context)
            trial.disturbed |= other.disturbed
            return other, found

        record = record.with_fields(case=trial.case.id)  # a drawn one stands under another key
        about = record, Behaviour.of(trial, record), trial.subject.device, trial.context
        return Failure(*about, lambda case: outcome(tried(case)[1]), lambda case: Failure.of(*tried(case)))

    @property
    def in_numbers(self) -> "Failure":
        """With large numbers where nothing may be read, if it is NaN that is wrong: they tell what was read."""
        if self.observed.is_numeric or self.case.poison == "large":
            return self
        other = self.again(replace(self.case, poison="large"))
        return other if other is not None and other.observed.is_numeric else self


def explain(failure: Failure, patience: float = PATIENCE) -> str:
    """What a failure looks like, or why nothing is told of it; so many seconds for candidates, and for cases nearby."""
    if not failure.record.is_wrong_number:
        return ""
    if len(failure.case.q) > _MOST_REQUESTS:
        return UNCOMPARED
    failure = failure.in_numbers
    everyone = candidates(failure.case.role)
    likenesses, until = dict[Candidate, float](), time.thread_time() + patience  # of those with time and memory to try
    for candidate in everyone:
        if time.thread_time() > until:
            break
        if (tried := behaviour(candidate, failure)) is not None:
            likenesses[candidate] = likeness(failure.observed, tried)
    fitting = [candidate for candidate, share in likenesses.items() if share >= ALIKE]
    if is_partial := len(likenesses) < len(everyone):
        if not fitting:
            return UNCOMPARED
    elif UNALIKE <= max(likenesses.values(), default=0.0) < ALIKE:
        return INDISTINCT
    held = _holding(fitting, failure, time.thread_time() + patience)
    said = describe(held or fitting, failure.observed.is_numeric and bool(held) and not is_partial)
    return f"{said} (not every known defect was compared)" if is_partial and said != INDISTINCT else said


@dataclass
class ReportedCauses:
    """What failures of a backend look like that are explained already."""

    texts: list[str]  # what was said of them
    # how many failures each candidate fitted; one mistake has many candidates, of which the same fits mostly
    fits: Counter[Candidate] = field(default_factory=Counter)
    spent: float = 0.0  # seconds that it took to see

    def explain(self, failure: Failure) -> str:
        """The text that is true of another failure as well; empty if none is, or there is no time to see."""
        if not self.texts or not failure.record.is_wrong_number or len(failure.case.q) > _MOST_REQUESTS:
            return ""
        started, failure = time.thread_time(), failure.in_numbers
        try:
            texts = [text for text in self.texts if failure.observed.is_numeric or text.startswith(_PERHAPS)]
            everyone = candidates(failure.case.role)
            named = [(each, text) for text in texts for each in everyone if each.reported in text]
            for candidate, text in sorted(named, key=lambda each: -self.fits[each[0]]):
                if self.spent + time.thread_time() - started > PATIENCE:
                    return ""
                tried = behaviour(candidate, failure)
                if tried is not None and likeness(failure.observed, tried) >= ALIKE:
                    self.fits[candidate] += 1
                    return text
        finally:
            self.spent += time.thread_time() - started
        return ""


def _holding(fitting: Sequence[Candidate], failure: Failure, until: float) -> list[Candidate]:
    """Those that pass and fail as the backend does on cases nearby, as far as there is time to try them."""
    case, found = failure.case, list(fitting)
    # Where all that is wrong is NaN, it comes first whether large numbers where nothing may be read do harm, too.
    unlike = [] if failure.observed.is_numeric or case.poison == "large" else [replace(case, poison="large")]
    for near in [*unlike, *neighbours(case)] if found else ():
        if not found or time.thread_time() > until:
            break
        if (seen := failure.nearby(near)) is not None:
            about = near, failure.context, failure.device
            found = [
                each
                for each in found
                if time.thread_time() > until or outcome(attempted(each.reference, *about)[1]) in (seen, None)
            ]
    return found


def behaviour(candidate: Candidate, failure: Failure) -> Behaviour | None:
    """What a candidate does on the case of a failure; None where it could not be judged, which is no likeness."""
    trial, record = attempted(candidate.reference, failure.case, failure.context, failure.device)
    return None if record.status is Status.UNAVAILABLE else Behaviour.of(trial, record)


def describe(fitting: Sequence[Candidate], certain: bool) -> str:
    """The sentence for a failure that these candidates fit, of which none is named if they are too many to help."""
    # Different causes: a known defect is the mistake of a fitting suspect that covers it.
    covered = {id for candidate in fitting for id in candidate.covers}
    reported = list(dict.fromkeys(each.reported for each in fitting if each.id not in covered))
    if not reported:
        return UNLIKE
    if len(reported) > 2:  # a sentence that names more would be of no help
        return INDISTINCT
    sentence = reported[0] if len(reported) == 1 else f"one of: {'; or '.join(reported)}"
    return sentence if certain else f"{_PERHAPS}{sentence}"
