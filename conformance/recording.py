"""From pytest's reports to records: attached where a test ran, collected and journalled where the run is controlled."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mla_conformance.journal import Journal
from mla_conformance.record import Record
from mla_conformance.verdict import Nonconformance, Status, Verdict

if TYPE_CHECKING:
    from mla_conformance.trial import Trial

PROPERTY = "mla_conformance"


def identity(trial: "Trial") -> Record:
    """The record of a trial that has no verdict yet."""
    subject, case = trial.subject, trial.case
    return Record(subject.name, subject.backend.reference, case.capability, case.id, Status.HARNESS_ERROR)


def record_of(
    report: pytest.TestReport, trial: "Trial", excinfo: "pytest.ExceptionInfo[BaseException] | None", seconds: float
) -> Record:
    """The record of a finished trial, with what a failure looks like, or the traceback of a fault of the harness."""
    verdict = trial.verdict
    if excinfo is not None and not isinstance(excinfo.value, Nonconformance | pytest.skip.Exception):
        verdict = Verdict(Status.HARNESS_ERROR, f"{type(excinfo.value).__name__}: {excinfo.value}")
    record = replace(identity(trial).with_verdict(verdict, round(seconds, 4)), evidence=trial.evidence())
    if record.status is Status.HARNESS_ERROR:
        return replace(record, detail=str(report.longrepr))
    return replace(record, explanation=_explanation(trial, verdict, seconds)) if record.failed else record


def attach(report: pytest.TestReport, record: Record) -> None:
    """Put a record into the report, and a failure's sentence and replay line in place of a traceback."""
    if record.failed and record.status is not Status.HARNESS_ERROR:
        report.longrepr = describe_failure(record)
    report.user_properties.append((PROPERTY, json.dumps(record.to_json())))


def describe_failure(record: Record) -> str:
    """For a person: what failed, what it looks like, and how to see it again."""
    where = f"{record.backend} {record.capability} · case {record.case}"
    explanation = f"\n     {record.explanation}" if record.explanation else ""
    return f"FAIL {where} · {record.message}{explanation}\n     replay: {record.replay}"


_SHORT_SECONDS = 0.5
_MOST_EXPLAINED = 3
_explained: dict[str, set[str]] = {}


def _explanation(trial: "Trial", verdict: Verdict, seconds: float) -> str:
    """What the failure looks like, for the first capabilities of a backend that fail.

    Every candidate repeats the trial, so it must be short; a process's first one is long because it loads everything.
    """
    told = _explained.setdefault(trial.subject.name, set())
    long = seconds > _SHORT_SECONDS and bool(_explained.keys() - {trial.subject.name} or told)
    if trial.case.capability in told or len(told) >= _MOST_EXPLAINED or long:
        return ""
    told.add(trial.case.capability)
    from mla_conformance.defects.explain import explain

    return explain(trial, verdict)


class Recorder:
    """Collects records on the controller and journals them; on a worker it only journals what is about to start."""

    def __init__(self, directory: Path | None) -> None:
        self.records: list[Record] = []
        self._journal = Journal.inside(directory) if directory else None

    def start(self, nodeid: str, record: Record) -> None:
        """Journal a trial before anything of it is launched."""
        if self._journal:
            self._journal.append("start", nodeid=nodeid, record=record.to_json())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the record of a finished trial, or of one that died with its worker."""
        found = [value for name, value in report.user_properties if name == PROPERTY]
        if found:
            self._keep(json.loads(str(found[-1])))
        elif report.when not in ("setup", "call", "teardown"):
            self._keep_crash(report)

    def _keep(self, data: dict[str, Any]) -> None:
        self.records.append(Record.from_json(data))
        if self._journal:
            self._journal.append("verdict", record=data)

    def _keep_crash(self, report: pytest.TestReport) -> None:
        """A worker that dies leaves no record; its start is in the journal."""
        if not self._journal:
            return
        judged = {_question(record) for record in self.records}
        started = [
            e["record"] for e in self._journal.events() if e["event"] == "start" and e["nodeid"] == report.nodeid
        ]
        if started and _question(Record.from_json(started[-1])) not in judged:
            message = "the process died during this case"
            self._keep({**started[-1], "status": Status.CRASH, "message": message, "detail": str(report.longrepr)})


def _question(record: Record) -> tuple[str, str, str]:
    """What a record answers; a drawn case may be one of the listed cases, too."""
    return record.reference, record.capability, record.case
