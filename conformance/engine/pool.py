"""The places of a run: how many there are, and what each is given of a machine's cores, memory and GPUs."""

import os
from dataclasses import dataclass

from mla_conformance.backends.roles import outside
from mla_conformance.engine.devices import (
    MOST_ON_GPU,
    VISIBLE,
    WHOLE,
    ahead_on,
    may_have_gpu,
    part_of,
    workers_on,
)
from mla_conformance.engine.limits import THREADS, machine_cores, machine_memory
from mla_conformance.engine.messages import Hello, Setup
from mla_conformance.engine.request import RequestError, RunRequest
from mla_conformance.engine.supervisor import Supervisor
from mla_conformance.engine.tasks import ENOUGH
from mla_conformance.vocabulary.arrays import SPACES, array_of

CPU_TIMEOUT = 300.0
GPU_TIMEOUT = 1800.0
LEAST_MEMORY = 2 * 2**30
GIVE_UP_AFTER = 5
_MOST_ON_CPU = 4
_WORTH = 20
"""Pairs of a case and a backend for which a worker is worth its start, which takes a second and a half of a core."""
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass(frozen=True)
class Limits:
    # processes that run cases; by default one for every 20 pairs of a case and a backend, at most one per core
    # and four, and as many on each GPU as its memory is enough for
    workers: int | None = None
    # seconds that a case may take; by default five minutes, on a GPU thirty, since kernels are compiled
    timeout: float | None = None
    # bytes that a worker may allocate; by default its share of the machine, without a limit on a GPU
    memory: int | None = None
    # equal failures of a backend's process after which the rest of its cases is not run
    give_up_after: int = GIVE_UP_AFTER
    ends_at: float = float("inf")  # when the run is ended, on the monotonic clock


def surely_cpu(request: RunRequest) -> bool:
    """Whether it is known without torch that no GPU is used."""
    return request.device == "cpu" or not may_have_gpu()


class Pool:
    """The places of a run, which the supervisor has; those that there are in any case are started at once."""

    def __init__(self, request: RunRequest, limits: Limits, supervisor: Supervisor, began: float) -> None:
        self.request, self.limits, self.supervisor, self.began = request, limits, supervisor, began
        self.beside = WHOLE  # what a worker has of its GPU beside the others
        self._on_cpu, self._most_on_cpu = surely_cpu(request), min(_MOST_ON_CPU, machine_cores())
        workers = limits.workers
        if not workers and self._on_cpu:
            worth = len(request.judged_ids) * len(request.backends) // _WORTH
            workers = self._most_on_cpu if any(request.explore) else max(1, min(self._most_on_cpu, worth))
        workers = workers or min(MOST_ON_GPU, machine_cores())
        self._add_place(request.device, workers)  # imports torch while the cases are counted
        self._most = max(1, len(request.judged_ids))  # have something to do
        for _ in range(1, limits.workers or min(workers, self._most)):
            self._add_place(request.device, workers)
        self.workers = len(supervisor.places)  # how many judge; further places compile ahead

    def settle(self) -> Hello:
        """Have as many places as the device is enough for, or as were asked for; what the first says of it.

        The GPUs are shared out among them. Those that may compile ahead start as well: what decides is there before a
        backend is imported.

        Raises:
            RequestError: the device that was asked for is not there.
            RunError: no process can be started.
            Stopped: by a signal or the deadline.
        """
        self._hello = hello = self.supervisor.hello()
        if not hello.device:
            raise RequestError("device cuda asked for, but torch sees no CUDA device; use --device cpu")
        if self._on_cpu:
            return hello
        gpus = len(hello.gpus) or 1
        workers = self.limits.workers or (min(self._most, workers_on(gpus, hello.memory)) if hello.gpus else 1)
        self.supervisor.end_places(workers if gpus == 1 else 1)  # the others have the first GPU, too
        self.workers = workers
        may_compile = hello.gpus and not self.limits.workers and self._most > ENOUGH
        places = workers + (ahead_on(gpus, hello.memory, workers) if may_compile else 0)
        for number in range(len(self.supervisor.places), places):
            self._add_place(hello.device, places, hello.gpus[number % gpus])
        if hello.gpus:
            self.supervisor.gpus = gpus
            self._share_memory(workers)
        return hello

    def get_ahead(self) -> int:
        """The number of the first place that compiles while the others judge; of as many as asked for one of four."""
        workers, places = self.workers, len(self.supervisor.places)
        self._share_memory(places)
        return workers if places > workers else workers - workers // 4

    def _share_memory(self, places: int) -> None:
        self.beside = part_of(self._hello.memory, -(-places // self.supervisor.gpus))

    def _add_place(self, device: str, workers: int, gpu: str = "") -> None:
        """Start one of so many, with its share of the cores, on a CPU of the memory, too.

        What it compiles is kept where the libraries keep it, for all places and runs: Triton, Inductor and CuTe DSL
        write whole files and rename them; FlashInfer and tvm-ffi lock a file, which ends with a process.
        """
        threads = {THREADS: max(1, machine_cores() // workers)}
        own = threads if self._on_cpu or workers == 1 else threads | {_COMPILE_THREADS: 1}
        variables = {name: str(number) for name, number in own.items() if name not in os.environ}
        share = max(LEAST_MEMORY, machine_memory() // (self.limits.workers or self._most_on_cpu))
        memory = self.limits.memory or share if self._on_cpu else None
        request = self.request
        array = tuple(case.id for name, space in SPACES.items() if space.role.file for case in array_of(name))
        asked = request.salt, any(request.explore), self.began, outside(), array
        setup = Setup(device, memory, *asked, variables, request.speed)
        self.supervisor.add_place(setup, variables | ({VISIBLE: gpu} if gpu else {}))
