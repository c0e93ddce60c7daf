"""The supervisor: deals tasks to places, watches them from outside, tells what came of each; and the pool of places."""

import os
import select
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from mla_conformance.backends import references, roles
from mla_conformance.cases.case import Case
from mla_conformance.engine import keeper, machine, messages
from mla_conformance.engine.place import BoundedLog, RunError, WorkerSlot, died
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.tasks import ENOUGH, TaskOutcome, Tasks
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.vocabulary.arrays import SPACES, array_of

CPU_TIMEOUT, GPU_TIMEOUT = 300.0, 1800.0
_MOST_ON_CPU, _MOST_STARTS = 4, 3
_MOST_ON_GPU = 6  # workers: more are no faster, since contexts take turns, and each has less of the GPU's memory
_MOST_AHEAD = 8  # workers of a GPU beside those, where a backend compiles, which takes cores and hardly a GPU
_WORKER_BYTES = 12 * 2**30  # for each: 2 GiB of kept inputs and golden results, two contexts, and most cases
_AHEAD_BYTES = 8 * 2**30  # what a GPU has for each worker where some compile
_WORTH = 20  # pairs of a case and a backend that are worth a worker's start, which takes 1.5 s of a core
POLL_SECONDS = 0.3  # between two looks whether somebody has a run end
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    # processes that run cases; by default one for every 20 pairs of a case and a backend, at most one per core
    # and four, and as many on each GPU as its memory is enough for
    workers: int | None = None
    timeout: float | None = None  # seconds of a case; by default 5 minutes, on a GPU 30, since kernels are compiled
    memory: int | None = None  # bytes that a worker may allocate; by default its share, on a GPU without a limit
    give_up_after: int = 5  # equal failures of a backend's process; then its other cases are not run
    ends_at: float = float("inf")  # when the run is ended, on the monotonic clock


@contextmanager
def heeded(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have a handler told of what ends a command; signals that were ignored from the start, as under nohup, stay so."""
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Stopped(Exception):
    """A run that was told to end: by the signal of this number, or by its deadline, 0."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(signal.Signals(number).name if number else "the deadline")
        self.signal = number

    @property
    def exit_status(self) -> int:
        return 128 + self.signal if self.signal else 0  # as of a shell; 0, which decides nothing, by a deadline


class Supervisor:
    """The processes of a run, which is told of signals until it is closed; then none of them is left."""

    def __init__(self, timeout: float, ends_at: float = inf) -> None:
        self.places: list[WorkerSlot] = []  # one for each worker
        self.timeout = timeout  # seconds that a case may take
        self.ends_at = ends_at  # the deadline of what is done, on the monotonic clock
        self.is_over: Callable[[], bool] | None = None  # asked now and then whether what is done is to end
        self.gpus = 0  # how many there are; the first so many places have one each
        self._early: keeper.Started | None  # a keeper that was started before there was a place for it
        self._early, pipe = keeper.begun.pop() if keeper.begun else (None, os.pipe())
        self.log = BoundedLog(pipe)
        self.told: Callable[[messages.Told], None] = lambda told: None  # of every case before it is launched
        self._starts = 0
        self.signal = 0  # the number of one that came
        self._tasks, self._part = Tasks(()), machine.WHOLE
        self._unbegun: Counter[int] = Counter()
        self._before = machine.children()
        self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._heeding = heeded(self._note)
        self._heeding.__enter__()
        machine.prctl(machine.ADOPTS_ORPHANS, 1)

    def _note(self, number: int, _: object) -> None:
        self.signal = number
        os.write(self._told[1], b"!")

    def end(self, kept: int = 0) -> None:
        ended, self.places = self.places[kept:], self.places[:kept]
        for place in ended:  # all of them at once
            place.connection.close()
            place.keeper.send_signal(signal.SIGCONT)
            place.keeper.terminate()
        for place in ended:
            place.end()
        if not kept:
            machine.end_children(self._before)

    def close(self) -> None:
        self.end()
        machine.prctl(machine.ADOPTS_ORPHANS, 0)
        os.close(self.log.descriptor)
        self.log.reader.join(5)  # seconds for what was printed last
        self._heeding.__exit__(None, None, None)
        for descriptor in self._told:
            os.close(descriptor)

    def add_place(self, setup: messages.Setup, environment: Mapping[str, str]) -> None:
        number, log = len(self.places), self.log.descriptor
        self.places.append(WorkerSlot(number, setup, environment, log, self.timeout, self._early))
        self._early = None
        self.places[-1].spawn()

    def hello(self, of_all: bool = False) -> messages.Hello:
        while len(said := [place.hello for place in self.places if place.hello]) < (len(self.places) if of_all else 1):
            deque(self._events(), 0)  # nothing was given that has an outcome
        return said[0]

    def run(self, tasks: Tasks, part: machine.GpuPart = machine.WHOLE) -> Iterator[TaskOutcome]:
        """Have all tasks carried out, an outcome for each. After a deadline, the same tasks can be gone on with.

        A case for which the part of a GPU that places have is never enough comes back undone.
        """
        self._tasks, self._part = tasks, part
        self._unbegun.clear()
        if part.is_alone:
            # All but one place of each GPU give back what they hold of it, or begin anew, which gives back all, but a
            # new process loads libraries again, which takes seconds.
            for place in self.places[self.gpus :]:
                if place.is_idle:  # others begin anew already
                    place.renew() if part.is_cleared else place.give(None)
            while not all(place.is_idle for place in self.places):
                deque(self._events(), 0)
        while True:
            for place in self.places[: self.gpus] if part.is_alone else self.places:
                while place.is_idle:
                    room = inf
                    if part.share is not None:  # what no other one has taken of the GPU beside its own share
                        there = self.places[place.number % self.gpus :: self.gpus]
                        others = [tasks.taken[other.number] - part.share for other in there if other is not place]
                        room = part.share + part.common - sum(max(0, more) for more in others)
                    if not (task := tasks.take(place.number, room, part.is_alone)):
                        break
                    is_fresh = isinstance(task, messages.Trace | messages.TakeTimes) or getattr(task, "fresh", False)
                    if place.history and is_fresh:
                        place.renew()
                        tasks.put_back(place.number, task)
                    else:
                        place.give(task, part.share and max(part.share, tasks.taken[place.number]))
            if not (any(place.task for place in self.places) or tasks.is_left()):
                return
            yield from self._events()

    def _events(self) -> Iterator[TaskOutcome]:
        poll = time.monotonic() + POLL_SECONDS if self.is_over else inf
        until = min((self.ends_at, poll, *(place.deadline for place in self.places if not place.is_idle)))
        seconds = None if until == inf else max(0.0, until - time.monotonic())
        listened = {number: place for place in self.places for number in (place.connection.fileno(), *place.ends)}
        ready, _, _ = select.select([*listened, self._told[0]], [], [], seconds)
        if self.signal:
            raise Stopped(self.signal)
        if time.monotonic() >= self.ends_at or (self.is_over and self.is_over()):
            raise Stopped
        speaking = [place for place in self.places if place in map(listened.get, ready)]
        # What was said in time counts, however late it is read.
        now = time.monotonic()
        for place in [place for place in self.places if not place.is_idle and place.deadline <= now]:
            if place not in speaking:
                place.expire()
        for place in speaking:
            for event in place.read():
                yield from self._outcomes(place, event)

    def _outcomes(self, place: WorkerSlot, event: messages.WorkerEvent) -> Iterator[TaskOutcome]:
        if isinstance(event, messages.Hello):
            self._starts = 0
        elif isinstance(event, messages.Told):
            self.told(event)
        elif isinstance(event, messages.TaskReply) and place.task is not None:
            task, place.task = place.task, None
            share, taken = self._part.share, self._tasks.taken[place.number]
            if share is not None and isinstance(task, messages.Judge):
                most = share + self._part.common
                lacked = event.record is not None and event.record.lacked_memory
                wants = min(2 * max(share, taken), most) if lacked else 0 if taken else event.wants
                # A case that had what it wanted is done: a worker that wanted more each time would never be.
                if taken < wants <= most:
                    self._tasks.defer(place.number, task, wants)
                    return
            yield TaskOutcome(task, event, history=tuple(place.history))
        elif isinstance(event, messages.Ended):
            yield from self._ended(place, event.status)

    def _ended(self, place: WorkerSlot, status: int) -> Iterator[TaskOutcome]:
        """What the end of a worker makes of its task; one that it had not begun is given to the next."""
        machine.end_children(self._before | {place.keeper.pid for place in self.places})
        given, place.task = place.task, None
        record = place.outcome(status) if given else None
        if record is None and isinstance(given, messages.Judge | messages.Explore):
            self._unbegun[id(given)] += 1  # again and again processes ended before they began it
            if self._unbegun[id(given)] >= _MOST_STARTS:
                if isinstance(given, messages.Explore):
                    case, fields = array_of(given.capability)[0], {"capability": EXPLORED}
                else:
                    case, fields = Case.parse(given.case), {}
                record = Record.begun(references.parse_reference(given.reference), case).with_fields(**fields)
                record = record.with_verdict(died(status, f", before the case began, {_MOST_STARTS} times"), 0.0)
        if given and (record or isinstance(given, messages.Unrecorded)):
            yield TaskOutcome(given, messages.TaskReply(record), place.why(status), tuple(place.history))
            return
        self._starts += 1
        if self._starts > _MOST_STARTS * len(self.places):
            raise RunError(f"no process can be started here ({machine.how(status)}):\n{self.log.tail}")
        if given:
            self._tasks.put_back(place.number, given)


class Pool:
    def __init__(self, request: RunRequest, limits: Limits, supervisor: Supervisor, began: float) -> None:
        """Start those that there are in any case at once; the others once the first has said what there is."""
        self.request, self.limits, self.supervisor, self.began = request, limits, supervisor, began
        self.beside = machine.WHOLE  # what a worker has of its GPU beside the others
        self._on_cpu, self._most_on_cpu = request.surely_cpu, min(_MOST_ON_CPU, machine.machine_cores())
        workers = limits.workers
        if not workers and self._on_cpu:
            worth = len(request.judged_ids) * len(request.backends) // _WORTH
            workers = self._most_on_cpu if any(request.explore) else max(1, min(self._most_on_cpu, worth))
        workers = workers or min(_MOST_ON_GPU, machine.machine_cores())
        self._add_place(request.device, workers)  # imports torch while the cases are counted
        most = max(1, len(request.judged_ids))  # have something to do
        for _ in range(1, limits.workers or min(workers, most)):
            self._add_place(request.device, workers)
        self.workers = len(supervisor.places)  # how many judge; further places compile ahead
        # While they import torch; of a role whose case cannot be called no other case need be.
        self.examples = tuple({case.role: case.id for case in map(Case.parse, reversed(request.judged_ids))}.values())
        self.hello = hello = supervisor.hello()
        if not hello.device:
            raise InputError("device cuda asked for, but torch sees no CUDA device; use --device cpu")
        if not self._on_cpu:
            gpus, cores = len(hello.gpus) or 1, machine.machine_cores()
            of_each = max(1, min(_MOST_ON_GPU, cores // gpus, hello.memory // _WORKER_BYTES))  # with a core for itself
            workers = limits.workers or (min(most, gpus * of_each) if hello.gpus else 1)
            supervisor.end(workers if gpus == 1 else 1)  # the others have the first GPU, too
            self.workers = places = workers
            if hello.gpus and not limits.workers and most > ENOUGH:
                # As many compile ahead as cores and memory are left for.
                left = min((cores - workers) // gpus, hello.memory // _AHEAD_BYTES - workers // gpus)
                places += gpus * max(0, min(_MOST_AHEAD, left))
            for number in range(len(supervisor.places), places):
                self._add_place(hello.device, places, hello.gpus[number % gpus])
            if hello.gpus:
                supervisor.gpus = gpus
                self._share_memory(workers)
        supervisor.hello(of_all=True)  # what judges is there before anything of a backend is

    def get_ahead(self) -> int:
        """The number of the first place that compiles while the others judge; of as many as asked for one of four."""
        workers, places = self.workers, len(self.supervisor.places)
        self._share_memory(places)
        return workers if places > workers else workers - workers // 4

    def _share_memory(self, places: int) -> None:
        self.beside = machine.part_of(self.hello.memory, -(-places // self.supervisor.gpus))

    def _add_place(self, device: str, workers: int, gpu: str = "") -> None:
        """Start one of so many, with its share of the cores, on a CPU of the memory, too.

        What it compiles is kept where the libraries keep it, for all places and runs: Triton, Inductor and CuTe DSL
        write whole files and rename them; FlashInfer and tvm-ffi lock a file, which ends with a process.
        """
        # Of a CPU one: several wait for each other over small tensors, on a busy machine longer than one computes.
        threads = {machine.THREADS: 1 if self._on_cpu else max(1, machine.machine_cores() // workers)}
        own = threads if self._on_cpu or workers == 1 else threads | {"TORCHINDUCTOR_COMPILE_THREADS": 1}
        variables = {name: str(number) for name, number in own.items() if name not in os.environ}
        share = max(2 * 2**30, machine.machine_memory() // (self.limits.workers or self._most_on_cpu))
        memory = self.limits.memory or share if self._on_cpu else None
        request = self.request
        array = tuple(case.id for name, space in SPACES.items() if space.role.file for case in array_of(name))
        asked = request.salt, any(request.explore), self.began, roles.outside(), array
        setup = messages.Setup(device, memory, *asked, variables, request.speed)
        self.supervisor.add_place(setup, variables | ({machine.VISIBLE: gpu} if gpu else {}))
