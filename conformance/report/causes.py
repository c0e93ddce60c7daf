"""Failures by their cause: what one bug did to fifty cases is told once. No torch."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_conformance.cases.case import Case
from mla_conformance.judging.record import UNLIKE, Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.report.shown import MESSAGE

WRONG: dict[str, str] = {
    Check.SHAPE: "tensors of a wrong number, kind or shape were returned",
    Check.DTYPE: "a tensor of a wrong dtype was returned",
    Check.DEVICE: "a tensor on a wrong device was returned",
    Check.MASK: "rows without keys, NaN or infinities are not as they have to be",
    Check.LSE: "the LSE is wrong",
    Check.OUTPUT: "the output is wrong",
    Check.OUT_TENSOR: "the given output tensor is not what was returned",
    Check.CACHE: "the cache does not hold what was to be written",
    Check.MUTATED_INPUT: "inputs were changed",
    Check.OUT_OF_BOUNDS_WRITE: "memory beside the output tensor was written",
    Check.PROCESS_STATE: "the state of the process was changed",
    Check.STALE_RESULT: "an earlier result was overwritten",
    Check.NONDETERMINISM: "the same call returns other bits",
    Check.BATCH_DEPENDENCE: "a result depends on the other requests of its batch",
    Check.NONLINEARITY: "the output is not linear in V",
    Check.UNDECLARED_SUPPORT: "what is declared unsupported is accepted, and comes out wrong",
    Check.UNSAFE_REFUSAL: "a refusal comes too late",
}
"""What failing a check means, of failures of which nothing more is known."""
_RAISED = re.compile(r"raised (.*)", re.DOTALL)
_PATH, _NUMBER = re.compile(r"(?<![\w.~-])[\w.~-]*(?:/[\w.~-]+)+"), re.compile(r"\b0x[0-9a-f]+\b|\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Cause:
    """What is wrong with a backend, and the cases that fail of it.

    Attributes:
        sentence: what is wrong; the text of an exception where one was raised.
        failures: at least one, in the order of the run.
    """

    sentence: str
    failures: tuple[Record, ...]

    @cached_property
    def example(self) -> Record:
        """The failure of the smallest case; of failures that need others before them, one that tells which."""
        conditional = [record for record in self.failures if record.confirmed]
        return min(conditional or self.failures, key=lambda record: _size(record.case))

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities that fail of it."""
        return tuple(dict.fromkeys(record.capability for record in self.failures))

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses of SPEC.md that it breaks."""
        return tuple(dict.fromkeys(record.clause for record in self.failures if record.clause))

    @property
    def used(self) -> tuple[float, float] | None:
        """Least and largest error by its budget, of the failures whose error exceeds it; None if there is none."""
        shares = [max(record.used.values(), default=0.0) for record in self.failures]
        exceeding = [share for share in shares if 1 < share < math.inf]
        return (min(exceeding), max(exceeding)) if exceeding else None

    @property
    def extent(self) -> str:
        """Use of the error budget and clauses, in words; empty if there is neither."""
        least, most = (f"{share:.3g}" for share in self.used) if self.used else ("", "")
        used = f", {least} to {most} × its budget" if least != most else f", {most} × its budget" if most else ""
        return used + (f" (SPEC {', '.join(self.clauses)})" if self.clauses else "")


def causes(records: Iterable[Record]) -> tuple[Cause, ...]:
    """The causes of the failures among the records of one backend, the one with most cases first."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.failed:
            groups.setdefault(_key(record), []).append(record)
    found = [Cause(_sentence(group), tuple(group)) for group in groups.values()]
    return tuple(sorted(found, key=lambda cause: -len(cause.failures)))


def _key(record: Record) -> tuple[str, str]:
    """What failures of one cause have in common: finding or explanation, the text of an exception, or the check."""
    if told := record.finding or (record.explanation if record.is_explained else ""):
        return "", told
    if _is_exception(record):
        return record.check or record.status, _NUMBER.sub("#", _PATH.sub("/…", _raised(record)[:MESSAGE]))
    return record.check or record.status, ""


def _sentence(group: Sequence[Record]) -> str:
    first = next((record for record in group if record.is_explained), group[0])
    if first.is_explained:
        return first.explanation
    if _is_exception(first):
        return _raised(min(group, key=lambda record: _size(record.case)))
    what = first.finding or (WRONG.get(first.check, first.check) if first.check else first.message)
    return f"{what}, {UNLIKE}" if any(record.explanation == UNLIKE for record in group) else what


def _is_exception(record: Record) -> bool:
    return record.check == Check.CALL or record.status in (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)


def _raised(record: Record) -> str:
    """What was raised, or what else ended the call, without where in the procedure."""
    text = record.message.removesuffix(f" (SPEC {record.clause})")
    return raised[1] if (raised := _RAISED.search(text)) else text


def _size(case: str) -> tuple[int, int, str]:
    """Tokens × heads, new ones and those of the context; then the length of the id."""
    parsed = Case.parse(case)
    return parsed.heads * (sum(parsed.q) + sum(parsed.kv)), len(case), case
