"""Failures by their cause, or by what is seen of them: what one bug did to fifty cases is told once. No torch."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from mla_conformance.cases.case import Case
from mla_conformance.judging.record import UNASKED, UNLIKE, Record
from mla_conformance.judging.verdict import ZERO, Check, Status
from mla_conformance.report.circumstances import circumstances
from mla_conformance.report.terminal import MESSAGE, near

_RAISED = re.compile(r"raised (.*)", re.DOTALL)
_PATH, _NUMBER = re.compile(r"(?<![\w.~-])[\w.~-]*(?:/[\w.~-]+)+"), re.compile(r"\b0x[0-9a-f]+\b|\d+", re.IGNORECASE)
_K = TypeVar("_K")
_T = TypeVar("_T")
CauseKind = Literal["likely", "further", "seen"]


@dataclass(frozen=True)
class Cause:
    """What is wrong with a backend, and the cases that fail of it.

    Attributes:
        sentence: what is wrong; the text of an exception where one was raised.
        failures: at least one.
        only: the kind of cases that fail of it, where that tells them from most that pass.
        kind: "likely" where the sentence names a mistake that does the same; "further" for what is only seen beside
            such a one, and may come of it; "seen" otherwise, and for what was raised.
    """

    sentence: str
    failures: tuple[Record, ...]
    kind: CauseKind = "seen"
    only: str = ""

    @cached_property
    def example(self) -> Record:
        """The failure of the simplest case; of failures that need others before them, one that tells which."""
        conditional = [record for record in self.failures if record.confirmed]
        return min(conditional or self.failures, key=simplicity)

    @property
    def is_undeclared(self) -> bool:
        """Whether its cases are of what the backend declares unsupported."""
        return all(map(_is_undeclared, self.failures))

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
        shares = [max(record.shares.values(), default=0.0) for record in self.failures]
        exceeding = [share for share in shares if 1 < share < math.inf]
        return (min(exceeding), max(exceeding)) if exceeding else None

    @property
    def reserve(self) -> str:
        """What is to be said behind its number of cases, where a likely cause stands beside it."""
        return ", possibly the same bug" if self.kind == "further" else ""

    @property
    def extent(self) -> str:
        """Use of the error budget and clauses, in words; empty if there is neither."""
        least, most = (f"{share:.3g}" for share in self.used) if self.used else ("", "")
        used = f", {least} to {most} × its budget" if least != most else f", {most} × its budget" if most else ""
        return used + (f" (SPEC {', '.join(self.clauses)})" if self.clauses else "")

    @property
    def headline(self) -> str:
        """What is wrong, with its extent."""
        return self.sentence + self.extent


def grouped(found: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """What has a key in common, in order of appearance."""
    groups: dict[_K, list[_T]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def causes(records: Sequence[Record]) -> tuple[Cause, ...]:
    """The causes of the failures among the records of one backend: likely ones first, then by their cases.

    What a backend declares unsupported and runs comes last.
    """
    alike = grouped((record for record in records if record.failed), _key).values()
    said = {sentence: list(chain(*groups)) for sentence, groups in grouped(alike, _sentence).items()}
    likely = _likely(said)
    found = [
        Cause(sentence + _compared(group), tuple(group), _kind(sentence, group, likely), circumstances(group, records))
        for sentence, group in said.items()
    ]
    return tuple(sorted(found, key=lambda cause: (cause.is_undeclared, cause.kind != "likely", -len(cause.failures))))


def _likely(said: Mapping[str, Sequence[Record]]) -> set[str]:
    """The sentences that name a mistake, but for those that leave open whether it is one of the others."""
    named = {sentence for sentence, group in said.items() if any(map(_named, group))}
    return {one for one in named if not any(other in one for other in named - {one})}


def _kind(sentence: str, group: Sequence[Record], likely: Collection[str]) -> CauseKind:
    if sentence in likely:
        return "likely"
    return "further" if likely and not (_is_exception(group[0]) or _is_undeclared(group[0])) else "seen"


def _key(record: Record) -> tuple[str, str]:
    """What failures of one cause have in common: finding or explanation, the text of an exception, or what was seen."""
    if reported := _named(record):
        return "", reported
    if _is_exception(record):
        return record.check or record.status, _NUMBER.sub("#", _PATH.sub("/…", _raised(record)[:MESSAGE]))
    return record.check or record.status, symptom(record)


def _named(record: Record) -> str:
    """The mistake that its numbers give away or that does the same; empty if there is none."""
    return record.finding or (record.explanation if record.is_explained else "")


def _sentence(group: Sequence[Record]) -> str:
    explained = next((record.explanation for record in group if record.is_explained), "")
    if not explained and _is_exception(group[0]):
        return _raised(min(group, key=simplicity))
    return explained or group[0].finding or symptom(group[0])


def _compared(group: Sequence[Record]) -> str:
    """How many were compared with everything that is known, if that was in vain, or that time ran out."""
    unlike = sum(record.explanation == UNLIKE for record in group)
    if any(record.is_explained for record in group):
        return ""
    if not unlike:
        said = next((record.explanation for record in group if record.explanation not in ("", UNASKED)), "")
        return f"; {said}" if said else ""
    return f", {UNLIKE}" + ("" if unlike == len(group) else f" ({unlike} of {len(group)} cases compared)")


def _is_exception(record: Record) -> bool:
    return record.check == Check.CALL or record.status in (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)


def _is_undeclared(record: Record) -> bool:
    return record.check in (Check.UNDECLARED_SUPPORT, Check.UNSAFE_REFUSAL)


def _raised(record: Record) -> str:
    """What was raised, or what else ended the call, without where in the procedure."""
    text = record.message.removesuffix(f" (SPEC {record.clause})")
    return raised[1] if (raised := _RAISED.search(text)) else text


_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)


def raised_at(record: Record) -> str:
    """Where a kernel raised, as ``file:line, in function``: the last place in its own file, else the last of all."""
    if record.check != Check.CALL:
        return ""
    frames, own = _FRAME.findall(record.detail), record.reference.rpartition(":")[0]
    found = [frame for frame in frames if Path(frame[0]).name == Path(own).name and own.endswith(".py")] or frames
    return "{}:{}, in {}".format(near(Path(found[-1][0])), *found[-1][1:]) if found else ""


def simplicity(record: Record) -> tuple[int, int, str]:
    """Fields that its case sets, which are those that differ from the default; then heads × tokens, old and new."""
    case = Case.parse(record.case)
    return record.case.count(";"), case.heads * (sum(case.q) + sum(case.kv)), record.case


WRONG: dict[str, str] = {
    Check.SHAPE: "returned tensors have a wrong number, kind or shape",
    Check.DTYPE: "a returned tensor has a wrong dtype",
    Check.DEVICE: "a returned tensor is on a wrong device",
    Check.MASK: "rows without keys, NaN or infinities are wrong",
    Check.LSE: "the LSE is wrong",
    Check.OUTPUT: "the output is wrong",
    Check.SELECTION: "the selected keys are wrong",
    Check.SCORE: "an index score is wrong",
    Check.OUT_TENSOR: "the given output tensor does not hold the result",
    Check.CACHE: "the cache does not hold the new entries",
    Check.MUTATED_INPUT: "inputs were changed",
    Check.OUT_OF_BOUNDS_WRITE: "memory beside the output tensor was written",
    Check.OUT_OF_BOUNDS: "memory beside an operand was read or written",
    Check.PROCESS_STATE: "the state of the process was changed",
    Check.STALE_RESULT: "an earlier result was overwritten",
    Check.NONDETERMINISM: "equal calls return different bits",
    Check.BATCH_DEPENDENCE: "a result depends on the other requests of its batch",
    Check.NONLINEARITY: "the output is not linear in V",
    Check.UNDECLARED_SUPPORT: "accepts a configuration it declares unsupported, and returns a right result",
    Check.UNSAFE_REFUSAL: "should have refused before doing anything",
}
"""What failing a check means, of failures of which nothing more is known."""
_ACCEPTED = "accepts a configuration it declares unsupported, and returns a wrong result"
_MASKED: dict[str, str] = {
    r"\boutput is nan\b": "the output is NaN where a number is expected",
    r"\boutput is -?inf\b": "the output is infinite where a number is expected",
    r"\boutput is not 0 where no key is visible": "the output is not 0 where no key is visible",
    r"\boutput is not 0 in \d+ rows of padding": "the output is not 0 in rows of padding",
    r"\bLSE is nan\b.*expected finite": "the LSE is NaN where a number is expected",
    r"\bLSE is -?inf\b.*expected finite": "the LSE is infinite where a number is expected",
    r"\bLSE is nan\b.*expected -inf": "the LSE is NaN where -inf is expected",
    r"\bLSE is inf\b.*expected -inf": "the LSE is +inf where -inf is expected",
    r"\bLSE is .*expected -inf": "the LSE is a number where -inf is expected",
}
"""What was seen of a failure of the check of masks, by what its message says."""


def symptom(record: Record) -> str:
    """What is wrong with a result, as far as that is seen; the message of a failure that names no check."""
    if record.check == Check.MASK:
        return next((what for said, what in _MASKED.items() if re.search(said, record.message)), WRONG[Check.MASK])
    if record.check == Check.UNSAFE_REFUSAL and "returned a wrong result" in record.message:
        return _ACCEPTED
    if ZERO in record.message:
        return ZERO
    return WRONG.get(record.check, record.check) if record.check else record.message
