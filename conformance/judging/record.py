"""The verdict, what the judge says of one case; and the record, one (backend, case) with its verdict.

Records, and facts of backends, are plain data that journals and reports hold.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from mla_conformance.backends.foreign import LINE, cut
from mla_conformance.cases.case import Case

if TYPE_CHECKING:
    from mla_conformance.backends.references import BackendReference


class Status(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    CRASH = "crash"
    TIMEOUT = "timeout"
    HARNESS_ERROR = "harness_error"
    EXPECTED_FAILURE = "expected_failure"  # failed, as an expectation says with its reason
    UNEXPECTED_PASS = "unexpected_pass"  # passed against an expectation, which is therefore wrong


# The statuses that fail a capability.
FAILED = (Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR, Status.UNEXPECTED_PASS)
REFUSED = "refused: "  # how what is said of a pass begins where a call had to be refused, so that nothing was computed


class Check(StrEnum):
    """What a failed case failed on, in the order in which it is judged, each with the clause of SPEC.md it is about."""

    clause: str

    def __new__(cls, name: str, clause: str = "") -> Self:
        member = str.__new__(cls, name)
        member._value_, member.clause = name, clause
        return member

    CALL = "call", "3.8"
    SHAPE = "shape", "3.1"
    DTYPE = "dtype", "3.1"
    DEVICE = "device", "3.1"
    MASK = "mask", "1.6"
    LSE = "lse", "4.2"
    OUTPUT = "output", "4.2"
    SELECTION = "selection", "8.4"
    SCORE = "score", "8.5"
    PREPARED = "prepared", "8.8"
    OUT_TENSOR = "out_tensor", "3.4"
    CACHE = "cache", "6.7"
    WRITTEN = "written", "9.1"
    MUTATED_INPUT = "mutated_input", "3.6"
    OUT_OF_BOUNDS_WRITE = "out_of_bounds_write", "3.6"
    OUT_OF_BOUNDS = "out_of_bounds", "3.10"
    PROCESS_STATE = "process_state", "3.6"
    STALE_RESULT = "stale_result", "3.7"
    NONDETERMINISM = "nondeterminism", "3.7"
    BATCH_DEPENDENCE = "batch_dependence", "3.7"
    NONLINEARITY = "nonlinearity", "1.1"
    UNDECLARED_SUPPORT = "undeclared_support", "3.8"
    UNSAFE_REFUSAL = "unsafe_refusal", "3.8"


CLAUSES = {check: check.clause for check in Check}
ARITHMETIC = (Check.MASK, Check.LSE, Check.OUTPUT)  # the checks that a wrong number of attention fails
COMPARED = (*ARITHMETIC, Check.SELECTION, Check.SCORE, Check.PREPARED)  # whose failures are compared with known defects
ZERO = "the whole output is 0"  # what messages say of such an output, which tells no cause


@dataclasses.dataclass(frozen=True)
class BudgetUse:
    """Worst error over its allowance, by rule; 1 is the limit. Exceeding values and NaN are reported as they are."""

    element: float = 0.0
    row: float = 0.0
    lse: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.element, self.row, self.lse)


@dataclasses.dataclass(frozen=True)
class Verdict:
    status: Status  # outcome
    message: str = ""  # one sentence for a person; empty for a pass
    check: Check | None = None  # what failed
    # request, token, head and column of the worst element
    where: dict[str, int] = dataclasses.field(default_factory=dict)
    used: BudgetUse = BudgetUse()  # share of the error budget
    detail: str = ""  # the traceback of a call that raised
    # judged rows, rows of the batch, and how many were drawn, where not every row was judged
    sampled: dict[str, int] = dataclasses.field(default_factory=dict)
    finding: str = ""  # what the numbers of a failure give away, as a clause for a person; empty if nothing
    # rows of a pass, each head counted, whose budget is so wide that zeros would pass as well: neither right nor wrong
    inconclusive: int = 0
    too_large: bool = False  # it was not judged, and by the suite's own estimate it takes more than this machine has

    def with_more(self, said: str) -> "Verdict":
        clause = f" (SPEC {self.check.clause})" if self.check else ""
        return dataclasses.replace(self, message=f"{self.message.removesuffix(clause)}; {said}{clause}")


def failed(check: Check, message: str, where: dict[str, int] | None = None, used: BudgetUse | None = None) -> Verdict:
    return Verdict(Status.FAIL, f"{message} (SPEC {check.clause})", check, where or {}, used or BudgetUse())


class Nonconformance(AssertionError):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


# What an exploration is called where a capability stands in reports; its case ids name the capability they are of.
EXPLORED: Final = "explored"
RecordKey = tuple[str, str]  # of what there is one record: a backend's reference; a case id, or the word above
# A share of the error budget as files hold it: JSON has no NaN and no infinity, so both are text.
Share = Annotated[float, Meta(ge=0)] | Literal["nan", "inf"]
Used = Annotated[dict[str, Share], Meta(description="Share of the error budget by rule; 1 is the limit.")]
Confirmed = Literal["", "alone", "after", "unrepeated"]

# Explanations of failures: that nothing explains; for which time ran out; of which nothing is told, since it would be a
# guess; that were not chosen for it, and look like none that was.
UNLIKE: Final = "unlike every known defect"
UNCOMPARED: Final = "not compared with every known defect, which would take too long"
INDISTINCT: Final = "compared with every known defect: several fit about as well, so that none is named"
UNASKED: Final = "not compared with every known defect: other failures of this kernel were"
_EXPLAIN_NOTHING = ("", UNLIKE, UNCOMPARED, INDISTINCT, UNASKED)
ENDED: Final = "explanation ended by "  # behind it stands how the process ended that looked for one
# Of a case that says nothing of the kernel, which it did not come to.
COMPILING: Final = "unjudged: it was still compiling when the time that a case may take was over; raise --timeout"
_SHOWN_CASES = 3


def replay_line(case: str, reference: str, after: Sequence[str] = (), salt: str = "", role: str = "") -> str:
    """The command that runs a case on a backend again, after others where it fails only then."""
    before = "".join(f" --after {shlex.quote(other)}" for other in after)
    salted = f" --salt {shlex.quote(salt)}" if salt else ""
    defined = f" --role {shlex.quote(role.partition('@sha256:')[0])}" if role else ""
    return f"mla-conformance replay {shlex.quote(case)} --backend {shlex.quote(reference)}{before}{salted}{defined}"


def written(share: float) -> Share:  # which ``float`` reads back
    return share if math.isfinite(share) else "nan" if math.isnan(share) else "inf"


def detection(drawn: int, fraction: float) -> float:
    """Least probability that a defect in this fraction of a case's rows touches one of ``drawn`` random ones."""
    return float(1.0 - (1.0 - fraction) ** drawn)


class Said(msgspec.Struct, frozen=True, kw_only=True):
    check: Annotated[str, Meta(description="What failed.")] = ""
    clause: Annotated[str, Meta(description="Clause of SPEC.md.")] = ""
    message: str = ""
    finding: Annotated[str, Meta(description="What the numbers of a failure give away.")] = ""
    where: Annotated[dict[str, int], Meta(description="Position of the worst element.")] = field(default_factory=dict)
    used: Used = field(default_factory=dict)
    explanation: Annotated[str, Meta(description="What it looks like beside known wrong kernels.")] = ""
    detail: Annotated[str, Meta(description="Traceback, if any.")] = ""
    judged: Annotated[Status | None, Meta(description="Status before an expectation was applied.")] = None
    expectation: Annotated[str, Meta(description="The expectation that was applied, or empty.")] = ""
    confirmation: Annotated[Confirmed, Meta(description="Whether a failure repeats in a fresh process.")] = ""
    after: Annotated[tuple[str, ...], Meta(description="The cases without which it does not fail.")] = ()
    inconclusive: Annotated[
        int, Meta(ge=0, le=2**53, description="Rows, of each head, where zeros would pass, too.")
    ] = 0
    too_large: Annotated[bool, Meta(description="Not judged: the suite estimates more than the machine has.")] = False


class Record(Said, frozen=True):
    backend: str  # name in reports
    reference: str  # what loads the backend again
    capability: str  # capability that the case decides
    case: str  # id of the case
    status: Status  # outcome
    seconds: float = 0.0  # wall time of the trial
    evidence: dict[str, str] = field(default_factory=dict)  # what served the calls, as the backend tells
    cases: int = 1  # how many cases it stands for; more than one for drawn cases of which none fails
    # `rows` judged `of` all, of which `drawn` at random; empty where every row was judged
    sampled: dict[str, int] = field(default_factory=dict)
    salt: str = ""  # what the inputs were drawn with beside the case; empty for none
    role: str = ""  # what defines the case's role, as PATH@sha256:DIGEST; empty of one of this project

    @staticmethod
    def begun(backend: "BackendReference", case: Case, salt: str = "") -> "Record":
        about = backend.name, backend.reference, case.capability, case.id
        return Record(*about, Status.HARNESS_ERROR, salt=salt, role=case.role.file)

    @property
    def key(self) -> str:
        """What tells a backend's records apart: the case, or for drawn cases, which no list holds, the exploration."""
        return self.capability if self.capability == EXPLORED else self.case

    @property
    def record_key(self) -> RecordKey:
        """What it answers; a drawn case may be one of the listed cases, too."""
        return self.reference, self.key

    @property
    def shares(self) -> dict[str, float]:
        return {rule: float(share) for rule, share in self.used.items()}

    @property
    def failed(self) -> bool:
        return self.status in FAILED

    @property
    def is_unjudged(self) -> bool:
        """Whether it has no verdict, though by the suite's own estimate this machine has enough memory for it."""
        return self.status is Status.UNAVAILABLE and not self.too_large

    @property
    def computed(self) -> bool:
        """Whether a call did what was asked: it passed, and not by refusing what it had to refuse."""
        return self.status is Status.PASS and not self.message.startswith(REFUSED)

    @property
    def lacked_memory(self) -> bool:
        """Whether there was no memory for it, though by the suite's own estimate this machine has enough."""
        return self.is_unjudged and self.message != COMPILING

    def with_fields(self, **changes: Any) -> "Record":
        return replace(self, **changes)

    @property
    def as_judged(self) -> "Record":
        return replace(self, status=self.judged, judged=None, expectation="") if self.judged else self

    @property
    def replay(self) -> str:
        return replay_line(self.case, self.reference, self.after, self.salt, self.role)

    @property
    def confirmed(self) -> str:
        if self.confirmation == "unrepeated":
            return "did not fail again, neither alone nor after the same cases"
        if self.confirmation != "after":
            return ""
        more = [f"and {len(self.after) - _SHOWN_CASES} more"] if len(self.after) > _SHOWN_CASES else []
        count = f"{len(self.after)} other case{'s' if len(self.after) > 1 else ''}"
        return f"fails only after {count}: {', '.join([*self.after[:_SHOWN_CASES], *more])}"

    @property
    def is_wrong_number(self) -> bool:
        return self.status is Status.FAIL and self.check in COMPARED

    @property
    def is_explained(self) -> bool:
        return self.explanation not in _EXPLAIN_NOTHING and not self.explanation.startswith(ENDED)

    @property
    def looks_like(self) -> str:
        return self.explanation if self.is_explained else self.finding or self.explanation

    @property
    def remarks(self) -> tuple[str, ...]:
        named = self.is_explained or bool(self.finding)
        ended = self.explanation if named and self.explanation.startswith(ENDED) else ""
        looks_like = f"looks like: {self.looks_like}" if named else self.looks_like
        return tuple(filter(None, (looks_like, ended, self.confirmed)))

    def with_verdict(self, verdict: Verdict, seconds: float) -> "Record":
        used = {rule: written(share) for rule, share in vars(verdict.used).items()}
        clause = verdict.check.clause if verdict.check else ""
        said = {"message": cut(verdict.message), "finding": cut(verdict.finding), "detail": cut(verdict.detail, LINE)}
        content = {**vars(verdict), **said, "check": verdict.check or "", "clause": clause, "used": used}
        return replace(self, **content, seconds=seconds)


# Kernels that torch launches for anybody: fills, copies, elementwise arithmetic, indexing, matrix products.
_OF_TORCH = ("at::native", "void at::", "at_cuda_detail", "compute_cuda_kernel", "nvjet", "Memcpy", "Memset")


class Traced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernels: dict[str, tuple[str, ...]] = {}  # names of the kernels of one call, by capability
    libraries: dict[str, str] = {}  # shared libraries that the backend brought into the process, and SHA-256

    @property
    def distinct(self) -> tuple[str, ...]:
        found = dict.fromkeys(name for names in self.kernels.values() for name in names)
        return tuple(name for name in found if not any(part in name for part in _OF_TORCH))

    def joined(self, other: "Traced") -> "Traced":
        return Traced({**other.kernels, **self.kernels}, {**other.libraries, **self.libraries})


NOTHING_TRACED = Traced()  # of a run without a GPU, or of a backend that passed nothing


@dataclasses.dataclass(frozen=True)
class BackendFacts:
    name: str  # name in reports
    reference: str = ""  # what loads the backend again
    reasons: tuple[str, ...] = ()  # why it is unavailable; empty if it can run
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # versions of its distributions
    emulated: bool = False  # it never counts as certified
    deviations: tuple[tuple[str, str], ...] = ()  # (convention of its library, what the adapter does about it)
    rounding: dict[str, str] = dataclasses.field(default_factory=dict)  # the declared rounding classes by name
    fingerprint: str = ""  # what tells that it is still the same: the digest of its file, or its versions
    # ids of the cases that hold every pair of classes which it declares and no listed case holds
    fitted: tuple[str, ...] = ()
    region: str = ""  # digest of the spaces and of these cases
    # all that it declares of each role, in words; it is the same in every process
    declared: dict[str, str] = dataclasses.field(default_factory=dict)
