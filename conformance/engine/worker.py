"""A worker: judges what it is told, in a process that may die of it.

The backends are in a process beside it, which is forked before a GPU is used.
"""

import faulthandler
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

import msgspec
import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.candidates import candidates
from mla_conformance.diagnosis.explain import PATIENCE, WHOLE, Failure, ReportedCauses, explain
from mla_conformance.diagnosis.heat import heat_of
from mla_conformance.driving.executor import Executor
from mla_conformance.driving.loaded import Loaded, newly_loaded
from mla_conformance.engine.describe import describe, device_facts, find_device, undescribed
from mla_conformance.engine.devices import may_have_gpu, visible_gpus
from mla_conformance.engine.kernel_process import start_kernel_process
from mla_conformance.engine.limits import LACKED_MEMORY, allocated_memory, leave, limit_memory
from mla_conformance.engine.messages import (
    Describe,
    Examine,
    Explore,
    Given,
    Hello,
    Judge,
    Setup,
    Task,
    TaskReply,
    Trace,
    Unrecorded,
    WorkerEvent,
    WorkerJudged,
    WorkerStarted,
    decode,
    encode,
    read_line,
)
from mla_conformance.engine.warming import warm_up
from mla_conformance.judging.needs import memory_need
from mla_conformance.judging.record import EXPLORED, NOTHING_TRACED, BackendFacts, Record, Traced
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.judging.traits import Traits
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.memory import free_memory, out_of_memory, whole_memory
from mla_conformance.traits.accuracy import accuracy
from mla_conformance.traits.bitwise import bitwise
from mla_conformance.traits.repeats import repeated
from mla_conformance.trials.context import GOLDEN_BYTES, PROBLEM_BYTES, Context
from mla_conformance.trials.explore import explore
from mla_conformance.trials.judge_one import judge_one, judged_trial
from mla_conformance.trials.regions import region_of
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trace import trace_all
from mla_conformance.trials.trial import Trial
from mla_conformance.vocabulary.arrays import SPACES, digest_of
from mla_conformance.vocabulary.capabilities import load_lists

Send = Callable[[WorkerEvent], None]
_AT_ONCE = 0.05
"""Seconds within which a process is given something that others wait for."""
_KEPT = PROBLEM_BYTES["cuda"] + GOLDEN_BYTES["cuda"]
"""Bytes of a GPU that a process has use for beside those of a case."""
_LARGE = 2**31
"""Bytes of the largest case of which a worker that shares its GPU goes on to hold what it took."""


def load_all(setup: Setup) -> None:
    """Have in memory what is otherwise imported or read when a case first needs it: a backend may write there."""
    tolerance()
    load_lists()
    for role in Role:
        candidates(role)
    wanted = ["torch.utils._device"]
    if setup.draws:
        wanted += ["numpy.random", "mla_conformance.cases.strategies"]
    if setup.device != "cpu" and may_have_gpu() and find_spec("triton"):
        wanted.append("mla_conformance.reference.gpu_weights")
    for module in wanted:
        import_module(module)


def serve(connection: socket.socket, setup: Setup) -> NoReturn:
    """Answer tasks until the supervisor closes its end, or until there is no memory to begin one with."""
    try:
        _answer_tasks(connection, setup)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        traceback.print_exc()
        leave(LACKED_MEMORY)


def _answer_tasks(connection: socket.socket, setup: Setup) -> NoReturn:
    process = os.getpid()
    executor = start_kernel_process(setup, connection)
    faulthandler.register(signal.SIGUSR1, file=connection.fileno(), all_threads=True, chain=True)
    if setup.memory:
        limit_memory(setup.memory)

    device = find_device(setup.device)
    connection.sendall(encode(_hello(process, device)))
    place = device or torch.device("cpu")
    executor.use(place)
    worker = Worker(place, setup.memory, lambda event: connection.sendall(encode(event)), executor, setup.salt)
    if not select.select([connection], [], [], _AT_ONCE)[0]:
        worker.warm_up()  # while others tell what the backends are
    _answer_all(connection, worker, process)


def _answer_all(connection: socket.socket, worker: "Worker", process: int) -> NoReturn:
    """Answer what is given to this process, until it is to judge nothing more."""
    while line := read_line(connection):
        try:
            given = decode(line, Given)
        except ValueError:
            continue  # the rest of what an earlier process has read in part
        if given.process != process:
            continue
        answer = worker.answer(given.task, given.share)
        if os.getpid() != process:
            leave(0)  # an import forked, and its child came back into a process that is not its own
        connection.sendall(encode(answer))
        if answer.leaves:
            break
    leave(0)


def _hello(process: int, device: torch.device | None) -> Hello:
    if device is None:
        return Hello(process, "", {})
    gpus = visible_gpus() if device.type == "cuda" else ()
    return Hello(process, device.type, device_facts(device), gpus, whole_memory(device))


class Worker:
    """What one process judges with."""

    def __init__(
        self, device: torch.device, memory: int | None, send: Send, executor: Executor, salt: str = ""
    ) -> None:
        self._device, self._memory, self._send = device, memory, send
        self._executor, self._context = executor, Context(salt)
        self._held_to: int | None = None
        self._last = ""
        self._subject = cache(self._loaded)

    def warm_up(self) -> None:
        """Use the GPU once, if it is one."""
        if self._device.type == "cuda":
            warm_up(self._context, self._device)

    def _loaded(self, reference: str) -> Subject:
        """A backend, imported; what that changed in the process is put back, since others are judged there as well."""
        subject = Subject.of(reference, self._device, self._executor)
        self._executor.make(partial(getattr, subject, "unavailable"))  # whoever asks again is told what it raised
        return subject

    def answer(self, task: Task | None, share: int | None = None) -> TaskReply:
        """Carry out a task, and tell what code that has loaded; a case that the GPU has no room for now waits."""
        if task is None:
            self._make_room()
            return TaskReply()
        self._hold_to(share)
        need = memory_need(Case.parse(task.case), self._device.type) if isinstance(task, Judge) else 0
        if isinstance(task, Judge) and not self._has_room(task, need, share):
            return TaskReply(wants=need + _KEPT)
        self._last = task.case if isinstance(task, Judge) else ""
        done = self._done(task)
        if share is not None and need > _LARGE and not done.leaves:
            torch.cuda.empty_cache()
            self._executor.make_room()
        loaded = self._executor.query(newly_loaded, Loaded).value
        return msgspec.structs.replace(done, loaded=loaded or Loaded())

    def _has_room(self, task: Judge, need: int, share: int | None) -> bool:
        """Whether a case fits what is left for it; alone on the GPU, whether it does without what this process holds.

        One that has judged nothing holds no more than it must, and waits for what others hold.
        """
        if share is not None:
            if need + _KEPT > share:
                return False
            if task.case != self._last and need + torch.cuda.memory_allocated(self._device) > share:
                self._make_room()  # what is kept of a case itself is counted with it
            return need <= free_memory(self._device)
        if self._device.type != "cuda" or task.fresh or need > whole_memory(self._device):
            return True
        if need <= free_memory(self._device):
            return True
        self._make_room()
        return need <= free_memory(self._device)

    def _make_room(self) -> None:
        """Give back what this process holds of its GPU for cases to come."""
        self._context.forget()
        self._executor.make_room()
        torch.cuda.empty_cache()

    def _hold_to(self, share: int | None) -> None:
        """Have torch give back what it keeps before it goes beyond a share, which others of this GPU count on."""
        if share != self._held_to:
            part = 1.0 if share is None else share / whole_memory(self._device)
            torch.cuda.set_per_process_memory_fraction(part, self._device)
            self._held_to = share

    def _done(self, task: Task) -> TaskReply:
        if isinstance(task, Unrecorded):
            return self._told(task)
        if isinstance(task, Explore):
            return self._explored(task)
        subject = self._subject(task.reference)
        for reference, before in task.before:
            earlier = self._subject(reference)
            if before:  # without a case it is imported, which is all
                judge_one(earlier, Case.parse(before), self._context, partial(self._starts, earlier))
        case = Case.parse(task.case)
        trial, record = judged_trial(subject, case, self._context, partial(self._starts, subject))
        heat = None
        if task.explain and record.status is Status.FAIL and not self._executor.lost(self._device):
            self._send(WorkerJudged(record))
            heat = msgspec.to_builtins(heat_of(trial, record))
            record = record.with_fields(explanation=_looks_like(task, trial, record))
        disturbed, declared = trial.disturbed, trial.declared
        del trial  # it keeps tensors
        return TaskReply(record, heat=heat, declared=declared, leaves=self._leaves(record, disturbed))

    def _told(self, task: Unrecorded) -> TaskReply:
        if isinstance(task, Describe):
            facts = self._described(task)
            return TaskReply(facts=facts, missing={} if facts.reasons else self._missing_roles(task))
        if isinstance(task, Trace):
            return self._traced(task)
        if isinstance(task, Examine):
            return self._examined(task)
        found = repeated(self._subject(task.reference), self._context, Case.parse(task.case), task.calls)
        return TaskReply(repeated=found, leaves=True)

    def _described(self, task: Describe) -> BackendFacts:
        subject = self._subject(task.reference)
        done = self._executor.query(partial(describe, subject), BackendFacts)
        facts: BackendFacts = done.value if not done.error else undescribed(subject, done.error)
        if facts.reasons:
            return facts
        declared = self._executor.query(partial(getattr, subject, "declarations"), dict[Role, Declaration])
        if declared.error:
            return undescribed(subject, declared.error)
        regions = (region_of(subject, SPACES[name], task.triples) for name in task.arrays)
        fitted = tuple(case.id for region in regions for case in region.cases)
        words = {role.value: repr(each) for role, each in declared.value.items()}
        return replace(facts, declared=words, fitted=fitted, region=digest_of(fitted))

    def _missing_roles(self, task: Describe) -> dict[Role, str]:
        """Why no case of a role can be called; of a role whose question fails its cases ask again."""
        subject, found = self._subject(task.reference), dict[Role, str]()
        for case in map(Case.parse, task.cases):
            asked = self._executor.query(partial(subject.missing_role, case), list[str])
            if asked.value and not (asked.error or asked.disturbed):
                found[case.role] = "; ".join(asked.value)
        return found

    def _explored(self, task: Explore) -> TaskReply:
        subject = self._subject(task.reference)

        def starts(case: Case) -> None:
            self._starts(subject, case, EXPLORED)

        record = explore(subject, task.draws, task.seconds, task.capabilities, self._context, starts)
        return TaskReply(record, leaves=self._leaves(record, disturbed=record.failed))

    def _traced(self, task: Trace) -> TaskReply:
        """What is seen to run, by a process that has not imported the backend before."""
        subject = Subject.of(task.reference, self._device, self._executor)
        seen = self._executor.query(partial(trace_all, subject, task.cases), Traced)
        return TaskReply(traced=seen.value or NOTHING_TRACED, leaves=True)

    def _examined(self, task: Examine) -> TaskReply:
        """By a process that judges nothing more: its kernels have been called as no case calls them."""
        subject = self._subject(task.reference)
        answers = bitwise(subject, self._context) if task.bitwise else ()
        spreads = accuracy(subject, self._context) if task.accuracy else ()
        return TaskReply(traits=Traits(answers, spreads), leaves=True)

    def _starts(self, subject: Subject, case: Case, capability: str = "") -> None:
        """Journal a case before anything of it is launched."""
        reference = subject.backend.reference
        capability, salt = capability or case.capability, self._context.salt
        record = Record(subject.name, reference, capability, case.id, Status.HARNESS_ERROR, salt=salt)
        self._send(WorkerStarted(record))

    def _leaves(self, record: Record, disturbed: bool) -> bool:
        """Whether this process must not judge further cases.

        It lost its GPU, or memory that it does not get back; what one case leaked must not be missing to the next. Or a
        backend left it other than it was.
        """
        if disturbed or record.check == Check.PROCESS_STATE or self._executor.lost(self._device):
            return True
        crowded = self._is_crowded()
        if record.status is Status.UNAVAILABLE:
            self._context.forget()
            # What processes share of a GPU may not have been opened, and is not offered again.
            return crowded or self._device.type == "cuda"
        return crowded

    def _is_crowded(self) -> bool:
        """Whether this process, or that of the backends, has taken half of what it may."""
        if self._executor.spent:
            return True
        taken = [allocated_memory(), self._executor.query(allocated_memory, int).value or 0]
        return self._memory is not None and 2 * max(taken) > self._memory


def _looks_like(task: Judge, trial: Trial, record: Record) -> str:
    """What a failure looks like, or whether it looks as others of its backend do."""
    failure = Failure.of(trial, record)
    if task.reported:
        return ReportedCauses(list(task.reported)).explain(failure)
    return explain(failure, WHOLE if task.unhurried else PATIENCE)
