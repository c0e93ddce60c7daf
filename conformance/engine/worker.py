"""A worker: judges what it is told, in a process that may die of it.

The backends are in a process beside it, which is forked before a GPU is used.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import NoReturn

import msgspec
import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.foreign import cut
from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.explain import PATIENCE, WHOLE, Failure, ReportedCauses, explain
from mla_conformance.diagnosis.heat import heat_of
from mla_conformance.diagnosis.reach import with_reach
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.driving.executor import Executor
from mla_conformance.driving.loaded import Loaded, newly_loaded
from mla_conformance.engine.devices import device_facts, find_device, may_have_gpu, visible_gpus
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
    TakeTimes,
    Task,
    TaskReply,
    Trace,
    WorkerEvent,
    WorkerExplored,
    WorkerJudged,
    WorkerStarted,
    decode,
    encode,
    read_line,
)
from mla_conformance.judging.judged_rows import memory_need
from mla_conformance.judging.record import EXPLORED, NOTHING_TRACED, BackendFacts, Record, Traced
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.judging.traits import Traits
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.problems.memory import free_memory, out_of_memory, whole_memory
from mla_conformance.roles.table import judge
from mla_conformance.speed.times import Speed
from mla_conformance.traits.accuracy import accuracy
from mla_conformance.traits.bitwise import bitwise
from mla_conformance.traits.repeats import repeated
from mla_conformance.trials.context import GOLDEN_BYTES, PROBLEM_BYTES, Context
from mla_conformance.trials.explore import explore, region_of
from mla_conformance.trials.judge_one import judge_one, judged_trial
from mla_conformance.trials.role_file import take_up
from mla_conformance.trials.subject import Subject, describe, unavailable
from mla_conformance.trials.trace import trace_all
from mla_conformance.vocabulary.arrays import SPACES, digest_of
from mla_conformance.vocabulary.capabilities import lists_of

Send = Callable[[WorkerEvent], None]
_AT_ONCE = 0.05  # seconds within which a process is given something that others wait for
_KEPT = PROBLEM_BYTES["cuda"] + GOLDEN_BYTES["cuda"]  # bytes of a GPU that a process has use for beside those of a case
_USUAL = "lse:q=[4]"
_TIMING = "mla_conformance.speed.measure"  # imported where kernels are to be timed
_LARGE = 2**31  # bytes of the largest case of which a worker that shares its GPU goes on to hold what it took


def load_all(setup: Setup) -> None:
    """Have in memory what is otherwise imported or read when a case first needs it: a backend may write there."""
    if setup.role:
        take_up(setup.role, setup.array)
    tolerance()
    for role in ("", *ROLES):
        lists_of(role)
    wanted = ["torch.utils._device"]
    if setup.draws:
        wanted += ["numpy.random", "mla_conformance.cases.strategies"]
    if setup.times:
        wanted.append(_TIMING)
    if setup.device != "cpu" and may_have_gpu() and find_spec("triton"):
        wanted.append("mla_conformance.reference.gpu_weights")
    for module in wanted:
        import_module(module)


def serve(connection: socket.socket, setup: Setup) -> NoReturn:
    """Answer tasks until the supervisor closes its end, or until there is no memory to begin one with."""

    def send(event: WorkerEvent) -> None:
        connection.sendall(encode(event))

    try:
        process, executor = os.getpid(), start_kernel_process(setup, connection)
        faulthandler.register(signal.SIGUSR1, file=connection.fileno(), all_threads=True, chain=True)
        if setup.memory:
            limit_memory(setup.memory)
        if device := find_device(setup.device):
            gpus = visible_gpus() if device.type == "cuda" else ()
            send(Hello(process, device.type, device_facts(device), gpus, whole_memory(device)))
        else:
            send(Hello(process, "", {}))
        executor.use(device := device or torch.device("cpu"))
        worker = Worker(device, setup.memory, send, executor, setup.salt)
        if not select.select([connection], [], [], _AT_ONCE)[0]:
            worker.warm_up()  # while others tell what the backends are
        while line := read_line(connection):
            try:
                given = decode(line, Given)
            except ValueError:
                continue  # the rest of what an earlier process has read in part
            if given.process == process:
                send(answer := worker.answer(given.task, given.share))
                if answer.leaves:
                    break
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        traceback.print_exc()
        leave(LACKED_MEMORY)
    leave(0)


class Worker:
    def __init__(
        self, device: torch.device, memory: int | None, send: Send, executor: Executor, salt: str = ""
    ) -> None:
        self._device, self._memory, self._send = device, memory, send
        self._executor, self._context = executor, Context(salt)
        self._held_to: int | None = None
        self._last = ""
        self._subjects: dict[str, Subject] = {}

    def warm_up(self) -> None:
        """Use a GPU once, before a case does: what is loaded when it is used first takes a second.

        All is done that is done for each case, without a backend: the results are the golden ones.
        """
        if self._device.type != "cuda":
            return
        with contextlib.suppress(Exception):  # the first case tells what is wrong
            problem = self._context.problem(Case.parse(_USUAL), self._device)
            expected = self._context.expect(problem)
            output, lse = islice(expected.tensors, 2)
            results = output.to(problem.output_dtype), lse.float()
            judge(problem, expected, Observation((Returned(problem.calls[0], results),), None, ()), Declaration())

    def _subject(self, reference: str) -> Subject:
        """A backend, imported; what that changed in the process is put back, since others are judged there as well."""
        if reference not in self._subjects:
            subject = self._subjects[reference] = Subject.of(reference, self._device, self._executor)
            self._executor.make(partial(getattr, subject, "unavailable"))  # whoever asks again is told what it raised
        return self._subjects[reference]

    def answer(self, task: Task | None, share: int | None = None) -> TaskReply:
        """Carry out a task, and tell what code that has loaded; a case that the GPU has no room for now waits."""
        if task is None:
            self._make_room()
            return TaskReply()
        if share != self._held_to:  # torch gives back what it keeps before it goes beyond what others count on
            part = 1.0 if share is None else share / whole_memory(self._device)
            torch.cuda.set_per_process_memory_fraction(part, self._device)
            self._held_to = share
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

    def _done(self, task: Task) -> TaskReply:
        if isinstance(task, Judge):
            return self._judged(task)
        if isinstance(task, Trace):  # by a process that has not imported the backend before
            traced = Subject.of(task.reference, self._device, self._executor)
            seen = self._executor.query(partial(trace_all, traced, task.cases), Traced)
            return TaskReply(traced=seen.value or NOTHING_TRACED, leaves=True)
        if isinstance(task, TakeTimes):  # the device first, by a process that has not imported the backend before
            timed = Subject.of(task.reference, self._device, self._executor)
            done = self._executor.query(partial(import_module(_TIMING).time_kernel, timed, task.forms), Speed)
            return TaskReply(speed=done.value or Speed(why=cut(f"its times are lost: {done.error}")), leaves=True)
        subject = self._subject(task.reference)
        if isinstance(task, Describe):
            return self._described(subject, task)
        if isinstance(task, Explore):
            starts = partial(self._starts, subject, capability=EXPLORED)
            asked = task.draws, task.seconds, task.capabilities

            def so_far(record: Record) -> None:
                self._send(WorkerExplored(record))

            record = explore(subject, *asked, self._context, starts, so_far)
            return TaskReply(record, leaves=self._leaves(record, disturbed=record.failed))
        if isinstance(task, Examine):  # whose kernels are called as no case calls them
            answers = bitwise(subject, self._context) if task.bitwise else ()
            spreads = accuracy(subject, self._context) if task.accuracy else ()
            return TaskReply(traits=Traits(answers, spreads), leaves=True)
        found = repeated(subject, self._context, Case.parse(task.case), task.calls)
        return TaskReply(repeated=found, leaves=True)

    def _judged(self, task: Judge) -> TaskReply:
        subject = self._subject(task.reference)
        for reference, before in task.before:
            earlier = self._subject(reference)
            if before:  # without a case it is imported, which is all
                judge_one(earlier, Case.parse(before), self._context, partial(self._starts, earlier))
        case, heat = Case.parse(task.case), None
        trial, record = judged_trial(subject, case, self._context, partial(self._starts, subject))
        is_told = record.status is Status.FAIL and not self._executor.lost(self._device)
        if is_told:
            record = with_reach(trial, record)
        if is_told and task.explain:
            self._send(WorkerJudged(record))
            heat, failure = heat_of(trial, record), Failure.of(trial, record)
            if task.reported:
                looks_like = ReportedCauses(list(task.reported)).explain(failure)
            else:
                looks_like = explain(failure, WHOLE if task.unhurried else PATIENCE)
            record = record.with_fields(explanation=looks_like)
            del failure
        # What the adapter declares of the role, in words, if it was asked.
        declared = {str(case.role): repr(trial.declaration)} if "declaration" in vars(trial) else {}
        disturbed = trial.disturbed
        del trial  # it keeps tensors
        return TaskReply(record, heat=heat, declared=declared, leaves=self._leaves(record, disturbed))

    def _described(self, subject: Subject, task: Describe) -> TaskReply:
        done = self._executor.query(partial(describe, subject), BackendFacts)
        if not done.error and done.value.reasons:
            return TaskReply(facts=done.value)
        declared = done
        if not done.error:
            declared = self._executor.query(partial(getattr, subject, "declarations"), dict[str, Declaration])
        if declared.error:
            return TaskReply(facts=unavailable(subject, f"could not be described: {declared.error}"))
        regions = (region_of(subject, SPACES[name], task.triples, self._context.salt) for name in task.arrays)
        fitted = tuple(case.id for region in regions for case in region.cases)
        words = {role: repr(each) for role, each in declared.value.items()}
        missing = dict[str, str]()  # of a role whose question fails its cases ask again
        for case in map(Case.parse, task.cases):
            asked = self._executor.query(partial(subject.missing_role, case), list[str])
            if asked.value and not (asked.error or asked.disturbed):
                missing[str(case.role)] = "; ".join(asked.value)
        facts = replace(done.value, declared=words, fitted=fitted, region=digest_of(fitted))
        return TaskReply(facts=facts, missing=missing)

    def _starts(self, subject: Subject, case: Case, capability: str = "") -> None:
        """Journal a case before anything of it is launched."""
        reference = subject.backend.reference
        capability, salt = capability or case.capability, self._context.salt
        record = Record(
            subject.name, reference, capability, case.id, Status.HARNESS_ERROR, salt=salt, role=case.role.file
        )
        self._send(WorkerStarted(record))

    def _leaves(self, record: Record, disturbed: bool) -> bool:
        """Whether this process must not judge further cases.

        It lost its GPU, or memory that it does not get back: it or that of the backends has taken half of what it may.
        What one case leaked must not be missing to the next. Or a backend left it other than it was.
        """
        if disturbed or record.check == Check.PROCESS_STATE or self._executor.lost(self._device):
            return True
        crowded = self._executor.spent
        if not crowded and self._memory is not None:
            taken = max(allocated_memory(), self._executor.query(allocated_memory, int).value or 0)
            crowded = 2 * taken > self._memory
        if record.status is Status.UNAVAILABLE:
            self._context.forget()
            # What processes share of a GPU may not have been opened, and is not offered again.
            return crowded or self._device.type == "cuda"
        return crowded
