"""Runs as ``certify`` makes them: several backends beside each alone, and all workers beside one.

A run on a GPU is made twice, since kernels are compiled in the first one. Workers share the threads, so that one has
all of them.
"""

import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import harmonic_mean

import torch

from mla_conformance.engine.devices import visible_gpus, workers_on
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.limits import machine_cores
from mla_conformance.engine.pool import Limits
from mla_conformance.engine.request import RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.judging.record import Record, RecordKey
from mla_conformance.judging.verdict import Status
from mla_conformance.problems.memory import whole_memory
from mla_conformance.report.terminal import counted


@dataclass(frozen=True)
class Measurement:
    """What a run judged and how long it took.

    Attributes:
        verdicts: the status of each question.
        seconds: from the start of its processes to their end.
        judging: seconds from the first verdict to the last.
    """

    verdicts: dict[RecordKey, Status]
    seconds: float
    judging: float

    def __str__(self) -> str:
        rate = f", {len(self.verdicts) / self.judging:.1f} verdicts a second" if self.judging else ""
        return (
            f"{len(self.verdicts)} verdicts in {self.seconds:.1f} s, "
            f"of which {self.judging:.1f} s from the first verdict to the last{rate}"
        )

    def ratio(self, other: "Measurement") -> str:
        """How much longer it took than another run."""
        judging = f"{self.judging / other.judging:.2f}" if other.judging else "?"
        ratio = f"{self.seconds / other.seconds:.2f}"
        return f"{ratio} times as long in all, {judging} times as long from the first verdict to the last"


def compare_runs(request: RunRequest, device: torch.device) -> Iterator[str]:
    """Lines on runs of each backend, of all, of all by one worker, and judged apart if asked for; their ratios.

    Raises:
        RunError: a run broke down.
    """
    selection = replace(request, device=device.type, apart=False)
    workers, alone = _workers(device), []
    yield "a run lasts from the start of its processes to their end; the report, written after it, is left out"
    for backend in selection.backends:
        alone.append((yield from _measured(replace(selection, backends=(backend,)), workers)))
    every = alone[0] if len(alone) == 1 else (yield from _measured(selection, workers))
    single = every if workers == 1 else (yield from _measured(selection, 1))
    if len(alone) > 1:
        yield f"all {len(alone)} took {_beside([every.seconds / one.seconds for one in alone])} as long as one alone"
    if single is every:
        yield "1 worker only: there are no more to compare it with"
    else:
        yield f"1 worker took, beside {counted(workers, 'worker')}, {single.ratio(every)}"
        yield from _agreement("one", single.verdicts, every.verdicts)
    if request.apart:
        apart = yield from _measured(replace(selection, apart=True), workers)
        yield f"judged apart, it took {apart.ratio(every)}"
        yield from _agreement("all, judged apart,", apart.verdicts, every.verdicts)


def _workers(device: torch.device) -> int:
    """As many as by default."""
    if device.type == "cuda":
        return workers_on(len(visible_gpus()), whole_memory(device))
    return max(1, min(4, machine_cores()))


def _beside(ratios: Sequence[float]) -> str:
    """The ratio to the mean of what the others took, and the smallest and largest of all."""
    return f"{harmonic_mean(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"


def _measured(selection: RunRequest, workers: int) -> Generator[str, None, Measurement]:
    """Make a run, after one like it on a GPU, and say what it took."""
    what = f"{_names(selection)} on {counted(workers, 'worker')}{', judged apart' * selection.apart}"
    if selection.device == "cuda":
        yield f"{what}: {_run(selection, workers)}: a warm-up, not counted"
    measured = _run(selection, workers)
    yield f"{what}: {measured}"
    return measured


def _run(selection: RunRequest, workers: int) -> Measurement:
    verdicts: dict[RecordKey, Status] = {}
    moments: list[float] = []

    def note(record: Record) -> None:
        verdicts[record.record_key] = record.status
        moments.append(time.perf_counter())

    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="mla-conformance-bench-") as folder,
        Run(selection, RunFolder.claim(Path(folder)), Limits(workers)) as run,
    ):
        run.prepare()
        run.begin()
        run.judge(note)
    judging = moments[-1] - moments[0] if moments else 0.0
    return Measurement(verdicts, time.perf_counter() - started, judging)


def _agreement(name: str, other: dict[RecordKey, Status], every: dict[RecordKey, Status]) -> Iterator[str]:
    different = [key for key in other | every if other.get(key) != every.get(key)]
    if not different:
        yield f"the same {len(every)} verdicts on {name} as on all"
    for reference, case in different:
        one, all_ = (found.get((reference, case), "none") for found in (other, every))
        yield f"DIFFERENT VERDICTS of {reference}, case {case}: on {name} {one}, on all {all_}"


def _names(selection: RunRequest) -> str:
    return ", ".join(backend.name for backend in selection.backends)
