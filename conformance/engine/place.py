"""One place of a run as the supervisor sees it: a keeper, its worker of the moment, its task, and the log."""

import contextlib
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mla_conformance.engine import keeper, messages
from mla_conformance.engine.machine import LACKED_MEMORY, cause_of, end_of, how, oom_kills, programs_below
from mla_conformance.judging.record import COMPILING, ENDED, Record, RecordKey, Status, Verdict

START_SECONDS = 300.0  # a process that imports torch for longer than this will not start at all
EXPLAIN_SECONDS = 300.0
"""Seconds of the clock for what has 120 of CPU time, and as many again for cases nearby; few take a tenth of it."""
_STACK_SECONDS, _END_SECONDS, _MOST_STACKS = 1.0, 10.0, 2**10
_READ = 2**16  # bytes at once
KEPT_BYTES = 16 * 2**20  # of what the processes print
_COMPILERS = {"cc1plus", "cicc", "clang", "clang++", "cudafe++", "g++", "gcc", "ld", "ninja", "nvcc", "ptxas"}
_IN_COMPILER = re.compile(
    rb"/(triton/(compiler|backends|runtime/build)|torch/(_dynamo|_inductor|utils/cpp_extension)|flashinfer/jit|"
    rb"cutlass/base_dsl|tilelang/jit|tvm_ffi/cpp)[/.]"
)
"""In the stacks of a process that compiles without a program of its own."""
HUNG = "no verdict within the time that a case may take; the process was ended"


def died(status: int, when: str = "", oom_killed: bool = False) -> Verdict:
    what = Status.UNAVAILABLE if status == LACKED_MEMORY or oom_killed else Status.CRASH
    why = ", while the system ended a process for want of memory" if oom_killed else ""
    return Verdict(what, f"the process died during this case{when}: {how(status)}{why}")


class RunError(RuntimeError):
    """A run that could not go on; what it had judged is in the journal."""


class BoundedLog:
    """Reads a pipe that processes print to; the first part of it goes into a file as soon as there is one."""

    _path: Path | None = None

    def __init__(self, pipe: tuple[int, int]) -> None:
        self._pipe, self.descriptor = pipe
        self._early, self._left, self._lock = b"", KEPT_BYTES, threading.Lock()
        self.reader = threading.Thread(target=self._copy, daemon=True)
        self.reader.start()

    def _copy(self) -> None:
        while block := os.read(self._pipe, _READ):
            with self._lock:
                self._early += block[: self._left]
                self._left -= min(len(block), self._left)
            if self._path:
                self.write_to(self._path)
        os.close(self._pipe)

    def write_to(self, path: Path) -> None:
        with self._lock:
            self._path, block, self._early = path, self._early, b""
            if block:
                with contextlib.suppress(OSError), path.open("ab") as file:  # a full disk costs the log, not the run
                    file.write(block)

    @property
    def tail(self) -> str:
        with self._lock:
            text = self._path.read_bytes() if self._path and self._path.exists() else self._early
        return "\n".join(text.decode("utf-8", "replace").splitlines()[-12:])


@dataclass(eq=False)
class WorkerSlot:
    number: int
    setup: messages.Setup
    environment: Mapping[str, str]  # variables of its processes beside those of this one
    log: int  # descriptor that its processes print to
    timeout: float  # seconds that a case may take
    early: keeper.Started | None = None  # its keeper, if one was started before there was a place for it
    hello: messages.Hello | None = None  # what the worker of the moment said of itself; None while there is none
    task: messages.Task | None = None  # what it is doing
    deadline: float = 0.0  # when something has to be done about it unless it is idle, on the monotonic clock
    # All that the worker of the moment was given to judge; without a case where it was asked what a backend is.
    history: list[RecordKey] = field(default_factory=list)
    _process: int = 0
    _started: Record | None = None
    _judged: Record | None = None
    _stacks: list[bytes] = field(default_factory=list)
    _buffer: bytes = b""
    _asked: bool = False
    _programs: set[str] = field(default_factory=set)
    _killed: bool = False
    _served: bool = False
    _makes_room: bool = False
    _oom_kills: int = 0  # of the system, when the task was given

    def spawn(self) -> None:
        own = {"stdout": self.log, "stderr": self.log, "env": {**os.environ, **self.environment}}
        self.keeper, self.connection = self.early or keeper.start_module(keeper.__name__, **own)
        self.early = None
        self.ends = end_of(self.keeper.pid)
        self.hello, self._buffer = None, b""
        self.deadline = time.monotonic() + START_SECONDS
        with contextlib.suppress(OSError):  # it died meanwhile: its end is on the way
            messages.tell(self.connection, self.setup)

    @property
    def is_idle(self) -> bool:
        return self.hello is not None and self.task is None and not self._makes_room

    def give(self, task: messages.Task | None, share: int | None = None) -> None:
        if task is None:
            self._makes_room = True
        else:
            self.task, self._started, self._judged, self._asked, self._killed = task, None, None, False, False
            self._oom_kills = oom_kills()
            if isinstance(task, messages.Unrecorded):
                self.history.append((task.reference, ""))
        self.deadline = time.monotonic() + self.timeout
        with contextlib.suppress(OSError):
            messages.tell(self.connection, messages.Given(self._process, task, share))

    def renew(self) -> None:
        if self.history or self.task:
            self.task, self._killed = None, True
            self._end_worker()

    def read(self) -> Iterator[messages.WorkerEvent]:
        """What came; the end of the keeper itself is an end of its worker, and it starts anew."""
        data = b""
        with contextlib.suppress(OSError):
            # A process that a backend left may hold the other end open: a keeper is lost when it says nothing more.
            data = self.connection.recv(_READ, socket.MSG_DONTWAIT)
        if not data:
            self.keeper.kill()
            status = self.end()
            self._signal(signal.SIGKILL)
            if self._served:
                # A new one would read what decides again, while a kernel may write there.
                said = f"the process that starts judges was ended from outside ({how(status)}); start the run anew"
                raise RunError(said)
            self.spawn()
            self._note(ended := messages.Ended(status))
            yield ended
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        stray = False
        for line in filter(None, lines):
            try:
                event = messages.decode(line, messages.WorkerEvent)
            except ValueError:
                stray = not self._asked  # else it is where the worker is
                if self._asked and len(self._stacks) < _MOST_STACKS:
                    self._stacks.append(line[:_READ])
                continue
            stray = stray and not isinstance(event, messages.Ended)  # it died in the middle of a line
            # What a worker says that is being ended comes too late.
            if not self._killed or isinstance(event, messages.Hello | messages.Ended):
                self._note(event)
                yield event
        if stray and self.hello:
            self._end_worker()  # nothing that it says can be told from what is lost

    def _note(self, event: messages.WorkerEvent) -> None:
        if isinstance(event, messages.Hello):
            self.hello, self._process, self.history, self._stacks = event, event.process, [], []
            self._killed, self._served = False, True
        elif isinstance(event, messages.Told):
            if event.step is messages.Step.STARTED:
                self._started, judged = event.record, (event.record.reference, event.record.case)
                if self.history[-1:] != [judged]:  # told twice where it waited for memory
                    self.history.append(judged)
            elif event.step is messages.Step.JUDGED:
                self._judged = event.record
            self.deadline = time.monotonic() + (EXPLAIN_SECONDS if self._judged else self.timeout)
        else:
            self._makes_room = False
            if isinstance(event, messages.Ended):
                self.hello, self._process = None, 0
                self.deadline = time.monotonic() + START_SECONDS
            elif event.leaves:
                self.hello = None
                self.deadline = time.monotonic() + _END_SECONDS

    def why(self, status: int) -> str:
        return f"no answer within {self.timeout:g} s" if self._killed else how(status)

    def outcome(self, status: int) -> Record | None:
        """The record of what a worker was judging when it ended; None if that was nothing yet."""
        if self._judged is not None:
            ended = f"its time limit, {EXPLAIN_SECONDS:g} s" if self._asked else cause_of(status)
            return self._judged.with_fields(explanation=f"{ENDED}{ended}")
        if self._started is None:
            return None
        if self._killed:
            detail = b"\n".join(self._stacks).decode("utf-8", "replace") or "no stacks: it did not answer the signal"
            compiling = self._programs & _COMPILERS or any(map(_IN_COMPILER.search, self._stacks))
            cut = Verdict(Status.UNAVAILABLE, COMPILING) if compiling else Verdict(Status.TIMEOUT, HUNG, detail=detail)
            return self._started.with_verdict(cut, self.timeout)
        oom_killed = status == -signal.SIGKILL and oom_kills() > self._oom_kills
        return self._started.with_verdict(died(status, oom_killed=oom_killed), 0.0)

    def expire(self) -> None:
        if not self._asked and self.task is not None:
            self._asked, self._killed = True, self._judged is None
            self._programs = programs_below(self._process)
            self._signal(signal.SIGUSR1)
            self._signal(signal.SIGCONT)  # it may have stopped itself
            self.deadline = time.monotonic() + _STACK_SECONDS
        elif self.hello is not None:
            self._end_worker()
        else:
            self.keeper.kill()
            self.deadline = time.monotonic() + _END_SECONDS

    def _end_worker(self) -> None:
        self.hello = None
        self.deadline = time.monotonic() + _END_SECONDS
        self._signal(signal.SIGKILL)
        self.keeper.send_signal(signal.SIGCONT)  # which its worker may have stopped

    def end(self) -> int:
        if self.ends:
            select.select(self.ends, [], [], _END_SECONDS)  # a wait with a limit sleeps between two looks
        status = keeper.end_of_process(self.keeper, 0 if self.ends else _END_SECONDS)
        self.connection.close()
        while self.ends:
            os.close(self.ends.pop())
        return status

    def _signal(self, number: int) -> None:
        if self._process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process, number)
