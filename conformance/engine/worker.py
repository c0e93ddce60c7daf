"""A worker: judges in a process that may die of it; backends and operands are in one beside it, forked before."""

import contextlib
import faulthandler
import importlib.util
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from mla_conformance.backends import foreign, loading, roles
from mla_conformance.backends.declaration import Declaration
from mla_conformance.cases.case import Case
from mla_conformance.cases.fitting import Region
from mla_conformance.diagnosis.explain import PATIENCE, WHOLE, Failure, ReportedCauses, explain
from mla_conformance.diagnosis.reach import heat_of, with_reach
from mla_conformance.driving import driver, remote, shared
from mla_conformance.driving.loaded import LOADED, Loaded, newly_loaded
from mla_conformance.engine import machine, messages
from mla_conformance.files.places import load_all_again
from mla_conformance.judging import explored, golden, tolerance, traits
from mla_conformance.judging.record import EXPLORED, NOTHING_TRACED, BackendFacts, Check, Record, Status, Traced
from mla_conformance.problems.memory import free_memory, out_of_memory, whole_memory
from mla_conformance.speed.times import Speed
from mla_conformance.traits import examine, repeats
from mla_conformance.trials import role_file
from mla_conformance.trials.facts import describe, region_of, trace_all, unavailable
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import GOLDEN_BYTES, PROBLEM_BYTES, Context, judge_one, judged_trial, load_procedures
from mla_conformance.vocabulary import arrays, capabilities

_STACK_SECONDS, _PIECE_SECONDS, _MOST_STACKS = 0.5, 0.05, 2**16
_KEPT = PROBLEM_BYTES["cuda"] + GOLDEN_BYTES["cuda"]  # bytes of a GPU that a process has use for beside those of a case
_TIMING = "mla_conformance.speed.measure"  # imported where kernels are to be timed
_EXPLORING = "mla_conformance.trials.explore"  # imported where cases are drawn
_LARGE = 2**31  # bytes of the largest case of which a worker that shares its GPU goes on to hold what it took


def load_all(setup: messages.Setup) -> None:
    """Have in memory what is otherwise imported or read when a case first needs it: a backend may write there."""
    loading.load_adapters()
    if setup.role:
        role_file.take_up(setup.role, setup.array)
    tolerance.tolerance()
    for role in ("", *roles.ROLES):
        capabilities.lists_of(role)
    load_procedures()
    wanted = ["torch.utils._device"]
    wanted += ["numpy.random", _EXPLORING] if setup.draws else []
    wanted += [_TIMING] if setup.times else []
    if setup.device != "cpu" and machine.may_have_gpu() and importlib.util.find_spec("triton"):
        wanted.append("mla_conformance.reference.gpu_weights")
    for module in wanted:
        importlib.import_module(module)


def serve(connection: socket.socket, setup: messages.Setup) -> NoReturn:
    """Answer tasks until the supervisor closes its end, or until there is no memory to begin one with."""
    process, send = os.getpid(), partial(messages.tell, connection)
    try:
        if setup.memory and sys.platform == "linux":  # beyond it allocations fail, in the kernel's process as well
            resource.setrlimit(resource.RLIMIT_DATA, (setup.memory, setup.memory))
        executor = start_kernel_process(setup, connection)
        faulthandler.register(signal.SIGUSR1, file=connection.fileno(), all_threads=True, chain=True)
        if device := machine.find_device(setup.device):
            gpus = machine.visible_gpus() if device.type == "cuda" else ()
            send(messages.Hello(process, device.type, machine.device_facts(device), gpus, whole_memory(device)))
        else:
            send(messages.Hello(process, "", {}))
        executor.use(device := device or torch.device("cpu"))
        worker = Worker(device, setup.memory, send, executor, Context(setup.salt))
        while line := messages.read_line(connection):
            try:
                given = messages.decode(line, messages.Given)
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
        machine.leave(machine.LACKED_MEMORY)
    machine.leave(0)


def start_kernel_process(setup: messages.Setup, supervisor: socket.socket) -> remote.RemoteExecutor:
    # The memory between two processes must be there before they part.
    memory, (stacks, reported), (mine, theirs) = shared.Shared(machine.machine_memory()), os.pipe(), socket.socketpair()
    judge, kernel = os.getpid(), os.fork()
    if not kernel:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        machine.end_with_parent(judge, signal.SIGKILL)
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > 2 and number not in (theirs.fileno(), reported):
                with contextlib.suppress(OSError):  # the folder's own
                    os.close(number)
        try:  # nothing that is raised may lead back into what the process that forked was doing
            load_all_again()
            LOADED.watch(setup.began)  # which trusts the folders of wheels that are searched so far
            sys.path.append(str(Path.cwd()))  # last: a plug-in's module often is there, and a kernel may write there
            machine.prctl(machine.DUMPABLE, 1)
            machine.renounce_rights()
            faulthandler.register(signal.SIGUSR1, file=reported, all_threads=True)
            remote.serve(theirs, memory)
        except BaseException as error:
            traceback.print_exc()
            machine.leave(machine.LACKED_MEMORY if out_of_memory(error) else 1)
        machine.leave(0)
    theirs.close()
    os.close(reported)
    signal.signal(signal.SIGUSR1, partial(_print_stacks, kernel, stacks, supervisor))
    machine.prctl(machine.DUMPABLE, 0)
    return remote.RemoteExecutor(mine, memory, partial(machine.end_as, kernel), machine.end_of(kernel))


def _print_stacks(kernel: int, stacks: int, supervisor: socket.socket, number: int, _: object) -> None:
    os.kill(kernel, number)
    os.kill(kernel, signal.SIGCONT)
    told, patience = b"", _STACK_SECONDS
    while len(told) < _MOST_STACKS and select.select([stacks], [], [], patience)[0]:
        told, patience = told + os.read(stacks, _MOST_STACKS), _PIECE_SECONDS
    supervisor.sendall(b"".join(b"kernel | " + line + b"\n" for line in told.splitlines()))


@dataclass
class Worker:
    device: torch.device
    memory: int | None  # bytes that it may allocate; None without a limit
    send: Callable[[messages.WorkerEvent], None]
    executor: driver.Executor
    context: Context = field(default_factory=Context)
    _held_to: int | None = None
    _last: str = ""
    _subjects: dict[str, Subject] = field(default_factory=dict)
    _regions: dict[tuple[str, str], Region] = field(default_factory=dict)  # what backends declare of roles, as needed

    def _subject(self, reference: str) -> Subject:
        if reference not in self._subjects:
            subject = self._subjects[reference] = Subject.of(reference, self.device, self.executor)
            self.executor.query(partial(getattr, subject, "unavailable"))  # whoever asks again is told what it raised
        return self._subjects[reference]

    def answer(self, task: messages.Task | None, share: int | None = None) -> messages.TaskReply:
        """Carry out a task, and tell what code that has loaded; a case that the GPU has no room for now waits."""
        if task is None:
            self._make_room()
            return messages.TaskReply()
        if share != self._held_to:  # torch gives back what it keeps before it goes beyond what others count on
            part = 1.0 if share is None else share / whole_memory(self.device)
            torch.cuda.set_per_process_memory_fraction(part, self.device)
            self._held_to = share
        need = 0
        if isinstance(task, messages.Judge):
            if share is not None or self.device.type == "cuda":
                need = golden.memory_need(Case.parse(task.case), self.device.type)
                if not self._has_room(task, need, share):
                    return messages.TaskReply(wants=need + _KEPT)
            self._last, done = task.case, self._judged(task)
        else:
            self._last, done = "", self._asked(task)
        if share is not None and need > _LARGE and not done.leaves:
            torch.cuda.empty_cache()
            self.executor.make_room()
        return msgspec.structs.replace(done, loaded=self.executor.query(newly_loaded, Loaded).value or Loaded())

    def _has_room(self, task: messages.Judge, need: int, share: int | None) -> bool:
        """Whether a case fits what is left for it; alone on the GPU, whether it does without what this process holds.

        One that has judged nothing holds no more than it must, and waits for what others hold.
        """
        if share is not None:
            if need + _KEPT > share:
                return False
            if task.case != self._last and need + torch.cuda.memory_allocated(self.device) > share:
                self._make_room()  # what is kept of a case itself is counted with it
            return need <= free_memory(self.device)
        if task.fresh or need > whole_memory(self.device) or need <= free_memory(self.device):
            return True
        self._make_room()
        return need <= free_memory(self.device)

    def _make_room(self) -> None:
        self.context.forget()
        self.executor.make_room()
        torch.cuda.empty_cache()

    def _asked(self, task: messages.Explore | messages.Unrecorded) -> messages.TaskReply:
        # Traced and timed by a process that has not imported the backend before: for times the device comes first.
        if isinstance(task, messages.Trace):
            anew = Subject.of(task.reference, self.device, self.executor)
            seen = self.executor.query(partial(trace_all, anew, task.cases), Traced)
            return messages.TaskReply(found=messages.Found(seen.value or NOTHING_TRACED), leaves=True)
        if isinstance(task, messages.TakeTimes):
            anew = Subject.of(task.reference, self.device, self.executor)
            done = self.executor.query(partial(importlib.import_module(_TIMING).time_kernel, anew, task.forms), Speed)
            speed = done.value or Speed(why=foreign.cut(f"its times are lost: {done.error}"))
            return messages.TaskReply(found=messages.Found(speed=speed), leaves=True)
        subject = self._subject(task.reference)
        if isinstance(task, messages.Describe):
            return self._described(task, subject)
        if isinstance(task, messages.Fit):  # this process may have to import the backend first
            told = self.executor.query(partial(getattr, subject, "unavailable"), list[str])
            if told.error or told.value:
                why = told.error or "; ".join(told.value)
                return messages.TaskReply(facts=unavailable(subject, f"cases could not be fitted to it: {why}"))
            region = region_of(subject, arrays.SPACES[task.capability], task.triples, self.context.salt)
            return messages.TaskReply(fitted=tuple(case.id for case in region.cases))
        if isinstance(task, messages.Explore):
            key, backend = (task.reference, task.capability), subject.backend
            if key not in self._regions:
                self._regions[key] = region_of(subject, arrays.SPACES[task.capability])

            def tell(found: explored.Explored) -> None:
                self.send(messages.Told(messages.Step.EXPLORED, found.record(backend), found, task.part))

            how = (task.extent, task.turn, self.context, partial(self._starts, subject, capability=EXPLORED), tell)
            found: explored.Explored = importlib.import_module(_EXPLORING).explore(subject, self._regions[key], *how)
            record = found.record(backend)
            return messages.TaskReply(explored=found, leaves=self._leaves(record, disturbed=record.failed))
        if isinstance(task, messages.Examine):  # whose kernels are called as no case calls them
            answers = examine.bitwise(subject, self.context) if task.bitwise else ()
            spreads = examine.accuracy(subject, self.context) if task.accuracy else ()
            return messages.TaskReply(found=messages.Found(traits=traits.Traits(answers, spreads)), leaves=True)
        again = repeats.repeated(subject, self.context, Case.parse(task.case), task.calls)
        return messages.TaskReply(repeated=again, leaves=True)

    def _judged(self, task: messages.Judge) -> messages.TaskReply:
        subject = self._subject(task.reference)
        for reference, before in task.before:
            earlier = self._subject(reference)
            if before:  # without a case it is imported, which is all
                judge_one(earlier, Case.parse(before), self.context, partial(self._starts, earlier))
        case, heat = Case.parse(task.case), None
        trial, record = judged_trial(subject, case, self.context, partial(self._starts, subject))
        if record.status is Status.FAIL and not self.executor.lost(self.device):
            record = with_reach(trial, record)
            if task.explain:
                self.send(messages.Told(messages.Step.JUDGED, record))
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
        leaves = self._leaves(record, disturbed)
        return messages.TaskReply(record, found=messages.Found(heat=heat), declared=declared, leaves=leaves)

    def _described(self, task: messages.Describe, subject: Subject) -> messages.TaskReply:
        declared = done = self.executor.query(partial(describe, subject), BackendFacts)
        if not done.error:
            if done.value.reasons:
                return messages.TaskReply(facts=done.value)
            declared = self.executor.query(partial(getattr, subject, "declarations"), dict[str, Declaration])
        if declared.error:
            return messages.TaskReply(facts=unavailable(subject, f"could not be described: {declared.error}"))
        words = {role: repr(each) for role, each in declared.value.items()}
        missing = dict[str, str]()  # of a role whose question fails its cases ask again
        for case in map(Case.parse, task.cases):
            asked = self.executor.query(partial(subject.missing_role, case.role), list[str])
            if asked.value and not (asked.error or asked.disturbed):
                missing[str(case.role)] = "; ".join(asked.value)
        return messages.TaskReply(facts=replace(done.value, declared=words), missing=missing)

    def _starts(self, subject: Subject, case: Case, capability: str = "") -> None:
        record = Record.begun(subject.backend, case, self.context.salt)
        self.send(messages.Told(messages.Step.STARTED, record.with_fields(capability=capability or case.capability)))

    def _leaves(self, record: Record, disturbed: bool) -> bool:
        """Whether a backend left process or GPU other than it was, or half of the memory is taken, leaked perhaps."""
        if disturbed or record.check == Check.PROCESS_STATE or self.executor.lost(self.device):
            return True
        crowded = self.executor.spent
        if not crowded and self.memory is not None:
            taken = max(machine.allocated_memory(), self.executor.query(machine.allocated_memory, int).value or 0)
            crowded = 2 * taken > self.memory
        if record.status is Status.UNAVAILABLE:
            self.context.forget()
            # What processes share of a GPU may not have been opened, and is not offered again.
            return crowded or self.device.type == "cuda"
        return crowded
