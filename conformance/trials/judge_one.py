"""Judging one case on one backend: one function with one result, the record, whoever asks."""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from mla_conformance.backends.foreign import cut, one_line
from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Case
from mla_conformance.judging.judged_rows import MOST_OPERATIONS, memory_need
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Nonconformance, Status, Verdict
from mla_conformance.problems.memory import free_memory, out_of_memory, wait_for_memory, whole_memory
from mla_conformance.roles.table import DEFINITIONS
from mla_conformance.trials.procedures import PROCEDURES, procedure_of
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial
from mla_conformance.vocabulary.capabilities import find_capability

MEMORY_PATIENCE = 120.0  # seconds for which a trial waits for a GPU's memory that others hold

OnStarted = Callable[[Case], None]  # told of a case when its backend's time begins


def load_all() -> None:
    """Have every role and procedure in memory, which are otherwise imported when a case first needs them."""
    for role in ROLES:
        _ = DEFINITIONS[role]
    for name in PROCEDURES:
        procedure_of(name)


def judge_one(subject: Subject, case: Case, context: Context, started: OnStarted = lambda case: None) -> Record:
    return judged_trial(subject, case, context, started)[1]


def judged_trial(
    subject: Subject, case: Case, context: Context, started: OnStarted = lambda case: None
) -> tuple[Trial, Record]:
    """The trial of a case, whose last observation can be explained, and its record.

    ``started`` is told of the case before anything of the backend is asked, and again after waiting for memory.
    """
    subject.executor.begin()
    trial, began, kind = Trial(subject, case, context), time.perf_counter(), subject.device.type
    try:
        started(case)
        trial.require_support()
        work, most = case.operations(), MOST_OPERATIONS.get(kind, inf)
        if work > most:
            what = f"too large for a {kind.upper()}: {work:.1e} useful operations, at most {most:.0e} are judged there"
            trial.settle(Verdict(Status.UNAVAILABLE, what))
        if kind == "cuda":
            _require_memory(trial)
            started(case)
        procedure_of(find_capability(case.capability).procedure)(trial)
        verdict = trial.verdict
    except Nonconformance as outcome:
        verdict = outcome.verdict
    except Exception as error:
        if out_of_memory(error):
            verdict = Verdict(Status.UNAVAILABLE, f"out of memory: {one_line(error)}")
        else:
            verdict = Verdict(Status.HARNESS_ERROR, one_line(error), detail=traceback.format_exc())
    if verdict.status is Status.UNAVAILABLE:
        # What a backend says that it lacked does not decide whether a case takes more than this machine has.
        too_long = case.operations() > MOST_OPERATIONS.get(kind, inf)
        too_large = too_long or memory_need(case, kind) > whole_memory(subject.device)
        verdict = replace(verdict, too_large=too_large)
    seconds, evidence = round(time.perf_counter() - began, 4), dict[str, str]()
    if "backend" in vars(trial):
        told = subject.executor.query(partial(_evidence_of, trial.backend), dict[str, str])
        evidence = {"kernel_evidence": f"raised {told.error}"} if told.error else told.value
    record = Record.begun(subject.backend, case, context.salt).with_fields(evidence=evidence)
    return trial, record.with_verdict(verdict, seconds)


def _require_memory(trial: Trial) -> None:
    """Unavailable where a case does not fit a GPU, after a wait if others hold its memory."""
    device = trial.subject.device
    need, whole = memory_need(trial.case, device.type), whole_memory(device)
    lacking = f"out of memory: may need {need / 2**20:.0f} MiB,"
    if need > whole:
        trial.settle(Verdict(Status.UNAVAILABLE, f"{lacking} this device has {whole / 2**20:.0f} MiB"))
    if free_memory(device) < need:
        trial.context.forget()
        trial.subject.executor.make_room()
    if (free := wait_for_memory(device, need, MEMORY_PATIENCE)) < need:
        found = f"{free / 2**20:.0f} MiB are free after {MEMORY_PATIENCE:.0f} s"
        trial.settle(Verdict(Status.UNAVAILABLE, f"{lacking} {found}"))


def _evidence_of(instance: Any) -> dict[str, str]:
    tell = getattr(instance, "kernel_evidence", dict)
    return {cut(str(name)): cut(str(value)) for name, value in tell().items()}
