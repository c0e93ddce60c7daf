"""``certify`` and ``replay``: a checked selection, pytest underneath, and the report of what its journal holds."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep

import torch

from mla_conformance.backends.platform import describe_device, get_device_capability
from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.explore import EXPLORED
from mla_conformance.journal import Journal
from mla_conformance.record import Record
from mla_conformance.report.summary import BackendSummary, RunSummary, by_backend, summarise
from mla_conformance.selection import Selection
from mla_conformance.subject import Subject
from mla_conformance.version import SUITE_VERSION, __version__

_POLL_SECONDS = 0.2
_PYTEST_USAGE_ERROR = 4
LOG_NAME = "pytest.log"


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
    """

    selection: Selection
    directory: Path
    workers: int
    extra: Sequence[str] = ()
    expectations: Expectations = field(default_factory=Expectations)

    @property
    def available(self) -> tuple[Subject, ...]:
        """The subjects that can run here."""
        return tuple(subject for subject in self.selection.subjects if not subject.unavailable)

    @property
    def listed(self) -> dict[str, int]:
        """Cases of each selected capability."""
        return {name: len(self.selection.cases_of(name)) for name in self.selection.capabilities}

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
        journal.path.unlink(missing_ok=True)
        with (self.directory / LOG_NAME).open("w", encoding="utf-8") as log:
            process = subprocess.Popen(self._command(), stdout=log, stderr=subprocess.STDOUT, env=self._environment())
            try:
                for record in _follow(journal, process):
                    on_record(self._expected(record))
            except BaseException:
                process.terminate()
                process.wait()
                raise
        self._check(process.returncode)

    def _check(self, status: int) -> None:
        if status in (0, 1, 5):
            return
        tail = "\n".join((self.directory / LOG_NAME).read_text(encoding="utf-8").splitlines()[-12:])
        usage = status == _PYTEST_USAGE_ERROR
        what = "pytest refused its arguments" if usage else f"pytest ended with status {status}"
        raise RunError(f"{what}:\n{tail}\n(whole log: {self.directory / LOG_NAME})", usage)

    def _command(self) -> list[str]:
        suite = Path(__file__).parent / "suite"
        options = ["--pyargs", "mla_conformance.suite", "-c", str(suite / "pytest.ini"), "--rootdir", str(suite)]
        options += ["-q", "-p", "no:cacheprovider", "-n", str(self.workers), "--max-worker-restart", "100000"]
        options += [f"--mla-out={self.directory}", f"--mla-tier={self.selection.tier}"]
        options += [f"--mla-device={self.selection.device.type}", f"--mla-explore={self.selection.explore}"]
        options += [f"--backend={subject.backend.reference}" for subject in self.available]
        options += [f"--mla-capability={name}" for name in self.selection.capabilities]
        options += [f"--mla-case={case.id}" for case in self.selection.cases]
        return [sys.executable, "-m", "pytest", *options, *self.extra]

    def _environment(self) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // max(1, self.workers)))
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **os.environ}

    def summary(self) -> RunSummary:
        """The outcome of everything that the journal holds."""
        groups = by_backend([self._expected(record) for record in _records(Journal.inside(self.directory))])
        backends = tuple(self._backend(subject, groups.get(subject.name, [])) for subject in self.selection.subjects)
        return RunSummary(environment(self.selection), backends)

    def _expected(self, record: Record) -> Record:
        if not self.expectations.entries:
            return record
        versions = next(subject.versions() for subject in self.selection.subjects if subject.name == record.backend)
        return self.expectations.apply(record, facts(environment(self.selection), versions))

    def _backend(self, subject: Subject, records: list[Record]) -> BackendSummary:
        if subject.unavailable:
            return BackendSummary(subject.name, tuple(subject.unavailable), {}, False, (), {}, ())
        declaration = subject.declaration
        return BackendSummary(
            name=subject.name,
            reasons=(),
            versions=subject.versions(),
            emulated=declaration.emulated,
            deviations=tuple((d.library, d.adapter) for d in declaration.deviations),
            rounding=subject.rounding,
            capabilities=summarise(records, self.expected),
        )


def default_workers(selection: Selection) -> int:
    """One process on a GPU; on a CPU one per core, up to four."""
    return 1 if selection.device.type == "cuda" else max(1, min(4, os.cpu_count() or 1))


def environment(selection: Selection) -> dict[str, str]:
    """Where and with what a run takes place."""
    return {
        "suite": SUITE_VERSION,
        "version": __version__,
        "tier": selection.tier.value,
        "device": describe_device(selection.device),
        "compute_capability": _compute_capability(selection.device),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": sys.platform,
    }


def _compute_capability(device: torch.device) -> str:
    capability = get_device_capability(device)
    return str(capability) if capability else ""


def _records(journal: Journal) -> Iterator[Record]:
    """Verdicts in the order in which they came."""
    return (Record.from_json(event["record"]) for event in journal.events() if event["event"] == "verdict")


def _follow(journal: Journal, process: "subprocess.Popen[bytes]") -> Iterator[Record]:
    """Records as they are journalled, until the process has ended and everything is read."""
    seen = 0
    while True:
        ended = process.poll() is not None
        records = list(_records(journal))
        yield from records[seen:]
        seen = len(records)
        if ended:
            return
        sleep(_POLL_SECONDS)
