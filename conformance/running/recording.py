"""From pytest's reports to records: attached where a test ran, collected and journalled where the run is controlled."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mla_conformance.isolation.journal import JOURNAL_LOST, Journal
from mla_conformance.isolation.watchdog import stacks_of
from mla_conformance.judging.record import Record, describe_failure
from mla_conformance.judging.verdict import Nonconformance, Status, Verdict

if TYPE_CHECKING:
    from mla_conformance.trials.trial import Trial

PROPERTY = "mla_conformance"
_LOST = "mla_conformance_journal_lost"
DIED = "the process died during this case"
HUNG = "no verdict within the time that a case may take; the process was ended"


def identity(trial: "Trial") -> Record:
    """The record of a trial that has no verdict yet."""
    subject, case = trial.subject, trial.case
    return Record(subject.name, subject.backend.reference, case.capability, case.id, Status.HARNESS_ERROR)


def record_of(
    report: pytest.TestReport,
    trial: "Trial",
    excinfo: "pytest.ExceptionInfo[BaseException] | None",
    seconds: float,
    evidence: dict[str, str],
) -> Record:
    """The record of a finished trial, with what a failure looks like, or the traceback of a fault of the harness."""
    from mla_conformance.driving.phases import spent

    if excinfo is not None and not isinstance(excinfo.value, Nonconformance | pytest.skip.Exception):
        trial.verdict = _undecided(excinfo.value)
    record = replace(identity(trial).with_verdict(trial.verdict, round(seconds, 4)), evidence=evidence, phases=spent())
    if record.status is Status.HARNESS_ERROR:
        return replace(record, detail=str(report.longrepr))
    if record.failed:
        record = replace(record, explanation=_explanation(trial, trial.verdict, seconds))
        spent()  # looking for an explanation is no part of the next trial
    return record


def attach(report: pytest.TestReport, record: Record) -> None:
    """Put a record into the report, and a failure's sentence and replay line in place of a traceback."""
    if record.status is Status.UNAVAILABLE:
        report.outcome, report.longrepr = "skipped", (report.location[0], report.location[1] or 0, record.message)
    elif record.failed and record.status is not Status.HARNESS_ERROR:
        report.longrepr = describe_failure(record)
    report.user_properties.append((PROPERTY, json.dumps(record.to_json())))


def _undecided(error: BaseException) -> Verdict:
    """What an exception of the harness, or of the backend outside its calls, leaves to say."""
    from mla_conformance.driving.driver import one_line
    from mla_conformance.problems.memory import out_of_memory

    if out_of_memory(error):
        return Verdict(Status.UNAVAILABLE, f"out of memory: {one_line(error)}")
    return Verdict(Status.HARNESS_ERROR, one_line(error))


_SHORT_SECONDS = 0.5
_MOST_EXPLAINED = 3
_MOST_REQUESTS = 256
_explained: dict[str, set[str]] = {}


def _explanation(trial: "Trial", verdict: Verdict, seconds: float) -> str:
    """What the failure looks like, for the first capabilities of a backend that fail.

    Every candidate repeats the trial, so it must be short; a process's first one is long because it loads everything.
    """
    told = _explained.setdefault(trial.subject.name, set())
    long = seconds > _SHORT_SECONDS and bool(_explained.keys() - {trial.subject.name} or told)
    long = long or len(trial.case.q) > _MOST_REQUESTS  # the candidates take one request after the other
    if trial.case.capability in told or len(told) >= _MOST_EXPLAINED or long or _device_lost(trial):
        return ""
    told.add(trial.case.capability)
    from mla_conformance.defects.explain import explain

    return explain(trial, verdict)


def _device_lost(trial: "Trial") -> bool:
    return trial.last is not None and trial.last.device_lost


class Recorder:
    """Collects records on the controller and journals them; on a worker it only journals what is about to start."""

    def __init__(self, directory: Path | None) -> None:
        self.records: list[Record] = []
        self._directory = directory
        self._journal = Journal.inside(directory) if directory else None

    def start(self, item: pytest.Item, record: Record) -> None:
        """Journal a trial before anything of it is launched."""
        if self._journal:
            try:
                self._journal.append("start", nodeid=item.nodeid, process=os.getpid(), record=record.to_json())
            except OSError as error:
                item.user_properties.append((_LOST, str(error.strerror)))
                raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the record of a finished trial, or of one that died with its worker."""
        properties = dict(report.user_properties)
        if _LOST in properties:
            self._give_up(str(properties[_LOST]))
        elif PROPERTY in properties:
            self._keep(json.loads(str(properties[PROPERTY])))
        elif report.when not in ("setup", "call", "teardown"):
            self._keep_crash(report)

    def _keep(self, data: dict[str, Any]) -> None:
        if self._journal:
            try:
                self._journal.append("verdict", record=data)
            except OSError as error:
                self._give_up(str(error.strerror))
        self.records.append(Record.from_json(data))

    def _give_up(self, reason: str) -> None:
        folder = f" of {self._directory}" if self._directory else ""
        pytest.exit(f"cannot write the journal{folder}: {reason}", JOURNAL_LOST)

    def _keep_crash(self, report: pytest.TestReport) -> None:
        """A worker that dies leaves no record; its start is in the journal."""
        if not self._journal or not self._directory:
            return
        judged = {record.question for record in self.records}
        started = [e for e in self._journal.events() if e["event"] == "start" and e["nodeid"] == report.nodeid]
        if started and Record.from_json(started[-1]["record"]).question not in judged:
            stacks = stacks_of(self._directory, started[-1]["process"])
            verdict = {"status": Status.CRASH, "message": DIED, "detail": str(report.longrepr)}
            if stacks:
                verdict = {"status": Status.TIMEOUT, "message": HUNG, "detail": stacks}
            self._keep({**started[-1]["record"], **verdict})
