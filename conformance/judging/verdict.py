"""The verdict: what the judge says of one case, as a value."""

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Outcome of one (backend, case)."""

    PASS = "pass"
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    CRASH = "crash"
    TIMEOUT = "timeout"
    HARNESS_ERROR = "harness_error"
    EXPECTED_FAILURE = "expected_failure"
    """Failed, as an expectation says with its reason."""
    UNEXPECTED_PASS = "unexpected_pass"
    """Passed against an expectation, which is therefore wrong."""


FAILED = (Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR, Status.UNEXPECTED_PASS)
"""The statuses that fail a capability."""


class Check(StrEnum):
    """What a failed case failed on, in the order in which it is judged."""

    CALL = "call"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    MASK = "mask"
    LSE = "lse"
    OUTPUT = "output"
    SELECTION = "selection"
    SCORE = "score"
    PREPARED = "prepared"
    OUT_TENSOR = "out_tensor"
    CACHE = "cache"
    WRITTEN = "written"
    MUTATED_INPUT = "mutated_input"
    OUT_OF_BOUNDS_WRITE = "out_of_bounds_write"
    OUT_OF_BOUNDS = "out_of_bounds"
    PROCESS_STATE = "process_state"
    STALE_RESULT = "stale_result"
    NONDETERMINISM = "nondeterminism"
    BATCH_DEPENDENCE = "batch_dependence"
    NONLINEARITY = "nonlinearity"
    UNDECLARED_SUPPORT = "undeclared_support"
    UNSAFE_REFUSAL = "unsafe_refusal"


ARITHMETIC = (Check.MASK, Check.LSE, Check.OUTPUT)
"""The checks that a wrong number of attention fails."""
COMPARED = (*ARITHMETIC, Check.SELECTION, Check.SCORE, Check.PREPARED)
"""The checks whose failures are compared with known defects."""
CLAUSES = {
    Check.CALL: "3.8",
    Check.SHAPE: "3.1",
    Check.DTYPE: "3.1",
    Check.DEVICE: "3.1",
    Check.MASK: "1.6",
    Check.LSE: "4.2",
    Check.OUTPUT: "4.2",
    Check.SELECTION: "8.4",
    Check.SCORE: "8.5",
    Check.PREPARED: "8.8",
    Check.OUT_TENSOR: "3.4",
    Check.CACHE: "6.7",
    Check.WRITTEN: "9.1",
    Check.MUTATED_INPUT: "3.6",
    Check.OUT_OF_BOUNDS_WRITE: "3.6",
    Check.OUT_OF_BOUNDS: "3.10",
    Check.PROCESS_STATE: "3.6",
    Check.STALE_RESULT: "3.7",
    Check.NONDETERMINISM: "3.7",
    Check.BATCH_DEPENDENCE: "3.7",
    Check.NONLINEARITY: "1.1",
    Check.UNDECLARED_SUPPORT: "3.8",
    Check.UNSAFE_REFUSAL: "3.8",
}

ZERO = "the whole output is 0"
"""What messages say of such an output, which tells no cause."""


@dataclass(frozen=True)
class BudgetUse:
    """Worst error over its allowance, by rule; 1 is the limit. Exceeding values and NaN are reported as they are."""

    element: float = 0.0
    row: float = 0.0
    lse: float = 0.0

    def worst_with(self, other: "BudgetUse") -> "BudgetUse":
        """The larger value of each rule."""
        return BudgetUse(max(self.element, other.element), max(self.row, other.row), max(self.lse, other.lse))

    @property
    def worst(self) -> float:
        """The largest of all rules."""
        return max(self.element, self.row, self.lse)


@dataclass(frozen=True)
class Verdict:
    """Status, reason and numbers of one case.

    Attributes:
        status: outcome.
        message: one sentence for a person; empty for a pass.
        check: what failed.
        where: request, token, head and column of the worst element, where there is one.
        used: share of the error budget.
        detail: the traceback of a call that raised.
        sampled: judged rows, rows of the batch, and how many were drawn, where not every row was judged.
        finding: what the numbers of a failure give away, as a clause for a person; empty if nothing.
        too_large: it was not judged, and by the suite's own estimate it takes more than this machine has.
    """

    status: Status
    message: str = ""
    check: Check | None = None
    where: dict[str, int] = field(default_factory=dict)
    used: BudgetUse = BudgetUse()
    detail: str = ""
    sampled: dict[str, int] = field(default_factory=dict)
    finding: str = ""
    too_large: bool = False

    @property
    def clause(self) -> str:
        """Clause of SPEC.md that a failure rests on."""
        return CLAUSES[self.check] if self.check else ""


def failed(check: Check, message: str, where: dict[str, int] | None = None, used: BudgetUse | None = None) -> Verdict:
    """A failure with its clause appended to the sentence."""
    return Verdict(Status.FAIL, f"{message} (SPEC {CLAUSES[check]})", check, where or {}, used or BudgetUse())


class Nonconformance(AssertionError):
    """A verdict other than pass, raised so that pytest counts it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
