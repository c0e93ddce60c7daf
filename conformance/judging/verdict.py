"""The verdict: what the judge says of one case, as a value."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self


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
        clause = f" (SPEC {self.check.clause})" if self.check else ""
        return replace(self, message=f"{self.message.removesuffix(clause)}; {said}{clause}")


def failed(check: Check, message: str, where: dict[str, int] | None = None, used: BudgetUse | None = None) -> Verdict:
    return Verdict(Status.FAIL, f"{message} (SPEC {check.clause})", check, where or {}, used or BudgetUse())


class Nonconformance(AssertionError):
    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
