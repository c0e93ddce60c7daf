"""The verdict: what the judge says of one case, as a value."""

from dataclasses import dataclass, field, replace
from enum import StrEnum


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


CLAUSES: dict[Check, str] = {
    **dict.fromkeys((Check.CALL, Check.UNDECLARED_SUPPORT, Check.UNSAFE_REFUSAL), "3.8"),
    **dict.fromkeys((Check.SHAPE, Check.DTYPE, Check.DEVICE), "3.1"),
    Check.MASK: "1.6",
    **dict.fromkeys((Check.LSE, Check.OUTPUT), "4.2"),
    Check.SELECTION: "8.4",
    Check.SCORE: "8.5",
    Check.PREPARED: "8.8",
    Check.OUT_TENSOR: "3.4",
    Check.CACHE: "6.7",
    Check.WRITTEN: "9.1",
    **dict.fromkeys((Check.MUTATED_INPUT, Check.OUT_OF_BOUNDS_WRITE, Check.PROCESS_STATE), "3.6"),
    Check.OUT_OF_BOUNDS: "3.10",
    **dict.fromkeys((Check.STALE_RESULT, Check.NONDETERMINISM, Check.BATCH_DEPENDENCE), "3.7"),
    Check.NONLINEARITY: "1.1",
}
"""The clause of SPEC.md that each is about."""
ARITHMETIC = (Check.MASK, Check.LSE, Check.OUTPUT)  # the checks that a wrong number of attention fails
COMPARED = (*ARITHMETIC, Check.SELECTION, Check.SCORE, Check.PREPARED)
"""The checks whose failures are compared with known defects."""
ZERO = "the whole output is 0"  # what messages say of such an output, which tells no cause


@dataclass(frozen=True)
class BudgetUse:
    """Worst error over its allowance, by rule; 1 is the limit. Exceeding values and NaN are reported as they are."""

    element: float = 0.0
    row: float = 0.0
    lse: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.element, self.row, self.lse)


@dataclass(frozen=True)
class Verdict:
    status: Status  # outcome
    message: str = ""  # one sentence for a person; empty for a pass
    check: Check | None = None  # what failed
    where: dict[str, int] = field(default_factory=dict)  # request, token, head and column of the worst element
    used: BudgetUse = BudgetUse()  # share of the error budget
    detail: str = ""  # the traceback of a call that raised
    # judged rows, rows of the batch, and how many were drawn, where not every row was judged
    sampled: dict[str, int] = field(default_factory=dict)
    finding: str = ""  # what the numbers of a failure give away, as a clause for a person; empty if nothing
    # rows of a pass, each head counted, whose budget is so wide that zeros would pass as well: neither right nor wrong
    inconclusive: int = 0
    too_large: bool = False  # it was not judged, and by the suite's own estimate it takes more than this machine has

    def with_more(self, said: str) -> "Verdict":
        clause = f" (SPEC {CLAUSES[self.check]})" if self.check else ""
        return replace(self, message=f"{self.message.removesuffix(clause)}; {said}{clause}")


def failed(check: Check, message: str, where: dict[str, int] | None = None, used: BudgetUse | None = None) -> Verdict:
    return Verdict(Status.FAIL, f"{message} (SPEC {CLAUSES[check]})", check, where or {}, used or BudgetUse())


class Nonconformance(AssertionError):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
