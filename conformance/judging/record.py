"""The record: one (backend, case) with its verdict, as plain data that journals and reports hold."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import msgspec

from mla_conformance.judging.verdict import FAILED, Status, Verdict

EXPLORED: Final = "explored"
"""What an exploration is called where a capability stands in reports; its case ids name the capability they are of."""

Share = Annotated[float, msgspec.Meta(ge=0)] | Literal["nan", "inf"]
"""A share of the error budget as files hold it: JSON has no NaN and no infinity, so both are text."""
Used = Annotated[dict[str, Share], msgspec.Meta(description="Share of the error budget by rule; 1 is the limit.")]
Confirmation = Literal["", "alone", "after", "unrepeated"]

UNLIKE: Final = "unlike every known defect"
"""The explanation of a failure that nothing explains."""
_SHOWN_CASES = 3


def replay_line(case: str, reference: str, after: Sequence[str] = (), salt: str = "") -> str:
    """The command that runs a case on a backend again, after others where it fails only then."""
    before = "".join(f" --after {shlex.quote(other)}" for other in after)
    salted = f" --salt {shlex.quote(salt)}" if salt else ""
    return f"mla-conformance replay {shlex.quote(case)} --backend {shlex.quote(reference)}{before}{salted}"


def written(share: float) -> Share:
    """A share as files hold it; ``float`` reads it back."""
    return share if math.isfinite(share) else "nan" if math.isnan(share) else "inf"


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
        explanation: what the failure looks like beside wrong kernels that are known; empty if it was not compared.
        seconds: wall time of the trial.
        detail: traceback of a harness error, a crash or a hang.
        phases: seconds of it by phase: the golden result, the backend's calls, the judge.
        evidence: what served the calls, as the backend tells: library, version, variant, plan.
        judged: status before an expectation was applied; None if none was.
        expectation: the expectation that was applied, or empty.
        cases: how many cases it stands for; more than one for drawn cases of which none fails.
        sampled: `rows` judged `of` all, of which `drawn` at random; empty where every row was judged.
        confirmation: whether a failure repeats in a fresh process: "alone", only "after" other cases, or "unrepeated"
            either way; empty if it is no failure, or was not tried again.
        after: ids of the cases that ran before it in the same process, if it fails only after these.
        finding: what the numbers of a failure give away, or empty.
        salt: what the inputs were drawn with beside the case; empty for none.
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
    judged: Status | None = None
    expectation: str = ""
    cases: int = 1
    sampled: dict[str, int] = field(default_factory=dict)
    confirmation: Confirmation = ""
    after: tuple[str, ...] = ()
    finding: str = ""
    salt: str = ""

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
        return self.status in FAILED

    @property
    def as_judged(self) -> "Record":
        """This record before an expectation was applied."""
        return replace(self, status=self.judged, judged=None, expectation="") if self.judged else self

    @property
    def replay(self) -> str:
        """The command that runs this case again."""
        return replay_line(self.case, self.reference, self.after, self.salt)

    @property
    def confirmed(self) -> str:
        """What confirming a failure found, in words; empty where it fails again alone, or was not tried again."""
        if self.confirmation == "unrepeated":
            return "did not fail again, neither alone nor after the same cases"
        if self.confirmation != "after":
            return ""
        more = [f"and {len(self.after) - _SHOWN_CASES} more"] if len(self.after) > _SHOWN_CASES else []
        count = f"{len(self.after)} other case{'s' if len(self.after) > 1 else ''}"
        return f"fails only after {count}: {', '.join([*self.after[:_SHOWN_CASES], *more])}"

    @property
    def is_explained(self) -> bool:
        """Whether it fails as a wrong kernel does that is known."""
        return self.explanation not in ("", UNLIKE)

    @property
    def looks_like(self) -> str:
        """What is wrong, in one sentence: what explains it or, without that, what its numbers give away."""
        return self.explanation if self.is_explained else self.finding or self.explanation

    @property
    def remarks(self) -> tuple[str, ...]:
        """What every view says of a failure below its message: what it looks like, and what confirming it found."""
        looks_like = self.looks_like if self.looks_like in ("", UNLIKE) else f"looks like: {self.looks_like}"
        return tuple(filter(None, (looks_like, self.confirmed)))

    def with_verdict(self, verdict: Verdict, seconds: float) -> "Record":
        """This record with a verdict's content."""
        content = {**vars(verdict), "check": verdict.check or "", "used": asdict(verdict.used)}
        return replace(self, **content, clause=verdict.clause, seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        used = {rule: written(share) for rule, share in self.used.items()}
        return {**msgspec.to_builtins(self), "used": used}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Record":
        """The record that :meth:`to_json` wrote.

        Raises:
            ValueError: it did not write this.
        """
        plain = msgspec.convert(data, dict[str, Any])
        used = msgspec.convert(plain.get("used", {}), dict[str, Share])
        return msgspec.convert({**plain, "used": {rule: float(share) for rule, share in used.items()}}, Record)


def describe_failure(record: Record) -> str:
    """For a person: what failed, what it looks like, and how to see it again."""
    where = f"{record.backend} {record.capability} · case {record.case}"
    remarks = "".join(f"\n     {remark}" for remark in record.remarks)
    return f"FAIL {where} · {record.message}{remarks}\n     replay: {record.replay}"
