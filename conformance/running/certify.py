"""``certify`` and ``replay``: a checked selection, pytest underneath, and the report of what its journal holds."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import torch

from mla_conformance.backends.platform import describe_device, get_device_capability
from mla_conformance.cases.sharding import Shard
from mla_conformance.driving.subject import Subject
from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.isolation.bounded_log import BoundedLog
from mla_conformance.isolation.devices import jit_caches, visible_gpus
from mla_conformance.isolation.journal import JOURNAL_LOST, Journal
from mla_conformance.isolation.limits import machine_memory
from mla_conformance.isolation.watchdog import WORKERS_FOLDER
from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.golden_cache import FOLDER_VARIABLE
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.report.summary import BackendSummary, RunSummary, by_backend, count_by_capability, summarise
from mla_conformance.running.plan import fingerprint, plan_of
from mla_conformance.running.selection import Selection
from mla_conformance.version import SUITE_VERSION, __version__

CPU_TIMEOUT = 300.0
GPU_TIMEOUT = 1800.0
LEAST_MEMORY = 2 * 2**30
_POLL_SECONDS = 0.1
_PYTEST_USAGE_ERROR = 4
LOG_NAME = "pytest.log"
_CASES_NAME = "cases.txt"


class RunError(RuntimeError):
    """A run that pytest refused (``usage``) or did not end by itself; what it had judged is in the journal."""

    def __init__(self, message: str, usage: bool) -> None:
        super().__init__(message)
        self.usage = usage


@dataclass(frozen=True)
class Run:
    """One run of the suite into a folder.

    Attributes:
        selection: what is judged.
        directory: receives journal, pytest's log and the reports.
        workers: processes that run cases.
        extra: further arguments for pytest.
        expectations: failures that are known, with reasons.
        timeout: seconds that a case may take; by default five minutes, on a GPU thirty, since kernels are compiled.
        memory: bytes that a worker may allocate; by default its share of the machine, without a limit on a GPU.
        resume: continue the run that the folder's journal tells of.
        shard: judge only this part of the selected cases.
        golden_cache: folder of golden states that runs and their workers share.
    """

    selection: Selection
    directory: Path
    workers: int
    extra: Sequence[str] = ()
    expectations: Expectations = field(default_factory=Expectations)
    timeout: float | None = None
    memory: int | None = None
    resume: bool = False
    shard: Shard | None = None
    golden_cache: Path | None = None

    @property
    def available(self) -> tuple[Subject, ...]:
        """The subjects that can run here."""
        return tuple(subject for subject in self.selection.subjects if not subject.unavailable)

    @property
    def cases(self) -> tuple[str, ...]:
        """Ids of the cases that this run is to judge."""
        return self.shard.cases if self.shard else self.selection.case_ids

    @property
    def listed(self) -> dict[str, int]:
        """Cases of each capability."""
        return count_by_capability(self.cases)

    @property
    def expected(self) -> dict[str, int]:
        """Records of each subject at least: one for each listed case, one for all drawn cases."""
        return self.listed | ({EXPLORED: 1} if self.selection.explore else {})

    def execute(self, on_record: Callable[[Record], None]) -> None:
        """Run the suite in a process of its own, handing over each record as it is journalled.

        Raises:
            RunError: pytest refused its arguments or broke down.
        """
        journal = Journal.inside(self.directory)
        try:
            self._begin(journal)
            process, log = self._start()
        except OSError as error:
            raise RunError(f"cannot write into {self.directory}: {error.strerror}", usage=False) from error
        try:
            for record in _follow(journal, process):
                on_record(self._expected(record))
        finally:
            _end(process)
            tail = log.close()
            shutil.rmtree(self.directory / WORKERS_FOLDER, ignore_errors=True)
        self._check(process.returncode, tail)

    def _begin(self, journal: Journal) -> None:
        """Write what the run is before anything of it is launched."""
        if self.resume:
            journal.repair()
            journal.append("resume")
        else:
            journal.path.unlink(missing_ok=True)
            journal.append("plan", plan=plan_of(self.selection, self.extra, self.shard))

    def _start(self) -> "tuple[subprocess.Popen[bytes], BoundedLog]":
        # A session of its own: Ctrl-C reaches this process alone, which then ends all others.
        process = subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment(),
            start_new_session=True,
        )
        return process, BoundedLog(self.directory / LOG_NAME, cast(BufferedReader, process.stdout))

    def _check(self, status: int, tail: str) -> None:
        if status in (0, 1, 5):
            return
        if status == JOURNAL_LOST:
            resume = f"mla-conformance certify --resume {shlex.quote(str(self.directory))}"
            what = tail.splitlines()[-1] if tail else "the journal cannot be written"
            raise RunError(f"{what}; what was judged before stands in it: make room, then {resume}", usage=False)
        usage = status == _PYTEST_USAGE_ERROR
        what = "pytest refused its arguments" if usage else f"pytest ended with status {status}"
        raise RunError(f"{what}:\n{tail}\n(whole log: {self.directory / LOG_NAME})", usage)

    def _command(self) -> list[str]:
        suite = Path(__file__).parents[1] / "suite"
        options = ["--pyargs", "mla_conformance.suite", "-c", str(suite / "pytest.ini"), "--rootdir", str(suite)]
        # Whatever pytest plugins are installed here would take their time in every process, and may shuffle cases.
        options += ["--disable-plugin-autoload", "-p", "xdist", "-p", "mla_conformance"]
        # Nothing is captured: what a backend prints goes to the log, whose length is bounded.
        options += ["-q", "-s", "-p", "no:logging", "-p", "no:cacheprovider"]
        options += ["-n", str(self.workers), "--max-worker-restart", "100000"]
        # Each worker has one stretch of cases, for a case's backends share its golden result, and who is done takes
        # half of another's rest. Dealt out in shares, the last long cases are one worker's.
        options += ["--dist", "worksteal"]
        options += [f"--mla-out={self.directory}", f"--mla-tier={self.selection.tier}"]
        options += [f"--mla-device={self.selection.device.type}", f"--mla-explore={self.selection.explore}"]
        options += [*self._limits(), *self._sharing()]
        options += [f"--backend={subject.backend.reference}" for subject in self.available]
        options += self._case_options()
        return [sys.executable, "-m", "pytest", *options, *self.extra]

    def _case_options(self) -> list[str]:
        if not (self.shard or self.selection.cases):
            return [f"--mla-capability={name}" for name in self.selection.capabilities]
        path = self.directory / WORKERS_FOLDER / _CASES_NAME  # a command line has a limit, a list of cases has none
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{case}\n" for case in self.cases), encoding="utf-8")
        return [f"--mla-cases={path}"]

    def _limits(self) -> list[str]:
        on_cpu = self.selection.device.type == "cpu"
        timeout = self.timeout or (CPU_TIMEOUT if on_cpu else GPU_TIMEOUT)
        memory = self.memory or (max(LEAST_MEMORY, machine_memory() // self.workers) if on_cpu else None)
        return [f"--mla-timeout={timeout}"] + ([f"--mla-memory={memory}"] if memory else [])

    def _sharing(self) -> list[str]:
        """Several workers on GPUs: one GPU each, and a cache of compiled kernels for these backends each."""
        if self.selection.device.type != "cuda" or self.workers == 1:
            return []
        names = [subject.name for subject in self.available]
        return [f"--mla-gpus={','.join(visible_gpus())}", f"--mla-jit={jit_caches(names)}"]

    def _environment(self) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // max(1, self.workers)))
        shared = {FOLDER_VARIABLE: str(self.golden_cache.resolve())} if self.golden_cache else {}
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **os.environ, **shared}

    def summary(self) -> RunSummary:
        """The outcome of everything that the journal holds."""
        position = {case: index for index, case in enumerate(self.cases)}
        records = sorted(
            _records(Journal.inside(self.directory).events()), key=lambda r: position.get(r.case, len(position))
        )
        groups = by_backend(list(map(self._expected, records)))
        backends = tuple(self._backend(subject, groups.get(subject.name, [])) for subject in self.selection.subjects)
        return RunSummary(environment(self.selection), backends, self.selection.case_ids, self.shard)

    def _expected(self, record: Record) -> Record:
        if not self.expectations.entries:
            return record
        versions = next(subject.versions() for subject in self.selection.subjects if subject.name == record.backend)
        return self.expectations.apply(record, facts(environment(self.selection), versions))

    def _backend(self, subject: Subject, records: list[Record]) -> BackendSummary:
        return BackendSummary(facts_of(subject), () if subject.unavailable else summarise(records, self.expected))


def facts_of(subject: Subject) -> BackendFacts:
    """What a report tells of a subject."""
    reference = subject.backend.reference
    if subject.unavailable:
        return BackendFacts(subject.name, reference, tuple(subject.unavailable))
    return BackendFacts(
        subject.name,
        reference,
        versions=subject.versions(),
        emulated=subject.declaration.emulated,
        deviations=tuple(map(astuple, subject.declaration.deviations)),
        rounding=subject.rounding,
        fingerprint=fingerprint(subject),
    )


def default_workers(selection: Selection) -> int:
    """One process per GPU; on a CPU one per core, up to four."""
    if selection.device.type == "cuda":
        return max(1, len(visible_gpus()))
    return max(1, min(4, os.cpu_count() or 1))


def environment(selection: Selection) -> dict[str, str]:
    """Where and with what a run takes place."""
    return {
        "suite": SUITE_VERSION,
        "version": __version__,
        "tier": selection.tier.value,
        "device": describe_device(selection.device),
        "compute_capability": _compute_capability(selection.device),
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "platform": sys.platform,
    }


def _compute_capability(device: torch.device) -> str:
    capability = get_device_capability(device)
    return str(capability) if capability else ""


def _records(events: Iterable[dict[str, Any]]) -> Iterator[Record]:
    """Verdicts in the order in which they came."""
    return (Record.from_json(event["record"]) for event in events if event["event"] == "verdict")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run's pytest, if it has not ended, and whatever a backend left behind in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _follow(journal: Journal, process: "subprocess.Popen[bytes]") -> Iterator[Record]:
    """Records as they are journalled, until the process has ended and everything is read."""
    position = 0
    while True:
        ended = _ends(process, _POLL_SECONDS)
        events, position = journal.events_from(position)
        yield from _records(events)
        if ended:
            return


def _ends(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None
