"""The record: one (backend, case) with its verdict, as plain data that journals and reports hold."""

import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from mla_conformance.judging.verdict import Status, Verdict

EXPLORED = "explored"
"""What an exploration is called where a capability stands in reports; its case ids name the capability they are of."""

_FAILED = (Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR, Status.UNEXPECTED_PASS)


def replay_line(case: str, reference: str) -> str:
    """The command that runs a case on a backend again."""
    return f"mla-conformance replay {shlex.quote(case)} --backend {shlex.quote(reference)}"


def detection(drawn: int, fraction: float) -> float:
    """Least probability that a defect in this fraction of a case's rows touches one of ``drawn`` random ones."""
    return float(1.0 - (1.0 - fraction) ** drawn)


@dataclass(frozen=True)
class Record:
    """A verdict with what it is about.

    Attributes:
        backend: name in reports.
        reference: what loads the backend again.
        capability: capability that the case decides.
        case: id of the case.
        status: outcome.
        message: one sentence; empty for a pass.
        check: what failed, or empty.
        clause: clause of SPEC.md, or empty.
        where: position of the worst element.
        used: share of the error budget by rule.
        explanation: what the failure looks like beside the known defects, for a capability's first failure.
        seconds: wall time of the trial.
        detail: traceback of a harness error, a crash or a hang.
        phases: seconds of it by phase: the golden result, the backend's calls, the judge.
        evidence: what served the calls, as the backend tells: library, version, variant, plan.
        judged: status before an expectation was applied, or empty.
        expectation: the expectation that was applied, or empty.
        cases: how many cases it stands for; more than one for drawn cases of which none fails.
        sampled: `rows` judged `of` all, of which `drawn` at random; empty where every row was judged.
    """

    backend: str
    reference: str
    capability: str
    case: str
    status: Status
    message: str = ""
    check: str = ""
    clause: str = ""
    where: dict[str, int] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    explanation: str = ""
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    judged: str = ""
    expectation: str = ""
    cases: int = 1
    sampled: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What tells a backend's records apart: the case, or for drawn cases, which no list holds, the exploration."""
        return self.capability if self.capability == EXPLORED else self.case

    @property
    def question(self) -> tuple[str, str, str]:
        """What it answers: reference, capability, case; a drawn case may be one of the listed cases, too."""
        return self.reference, self.capability, self.case

    @property
    def failed(self) -> bool:
        """Whether this record fails its capability."""
        return self.status in _FAILED

    @property
    def as_judged(self) -> "Record":
        """This record before an expectation was applied."""
        return replace(self, status=Status(self.judged), judged="", expectation="") if self.judged else self

    @property
    def replay(self) -> str:
        """The command that runs this case again."""
        return replay_line(self.case, self.reference)

    def with_verdict(self, verdict: Verdict, seconds: float) -> "Record":
        """This record with a verdict's content."""
        content = {**self.to_json(), **verdict.to_json(), "check": verdict.check or "", "seconds": seconds}
        return Record.from_json(content)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Record":
        """The record that :meth:`to_json` wrote."""
        return Record(**{**data, "status": Status(data["status"])})


def describe_failure(record: Record) -> str:
    """For a person: what failed, what it looks like, and how to see it again."""
    where = f"{record.backend} {record.capability} · case {record.case}"
    explanation = f"\n     {record.explanation}" if record.explanation else ""
    return f"FAIL {where} · {record.message}{explanation}\n     replay: {record.replay}"
