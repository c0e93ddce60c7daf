"""Failures by their cause, or by what is seen of them, with the kind of cases and advice. No torch."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Literal, TypeVar

from mla_conformance.backends.foreign import cut
from mla_conformance.cases.case import Case
from mla_conformance.judging.record import ENDED, EXPLORED, UNASKED, UNCOMPARED, UNLIKE, ZERO, Check, Record, Status
from mla_conformance.report.terminal import MESSAGE, columns, counted, near, wrapped

_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_RAISED = re.compile(r"raised (.*)", re.DOTALL)
_PATH, _NUMBER = re.compile(r"(?<![\w.~-])[\w.~-]*(?:/[\w.~-]+)+"), re.compile(r"\b0x[0-9a-f]+\b|\d+", re.IGNORECASE)
_K = TypeVar("_K")
_T = TypeVar("_T")
UNWANTED = f"{ENDED}--no-explain"
CauseKind = Literal["likely", "further", "seen"]


@dataclass
class Cause:
    sentence: str  # what is wrong; the text of an exception where one was raised
    failures: tuple[Record, ...]  # at least one
    # "likely" where the sentence names a mistake that does the same; "further" for what is only seen beside such a one,
    # and may come of it; "seen" otherwise, and for what was raised
    kind: CauseKind = "seen"
    only: str = ""  # the kind of cases that fail of it, where that tells them from most that pass

    def __post_init__(self) -> None:
        # The failure of the simplest case; of failures that need others before them, one that tells which.
        self.example = min([x for x in self.failures if x.confirmed] or self.failures, key=simplicity)
        self.capabilities = tuple(dict.fromkeys(record.capability for record in self.failures))
        self.clauses = tuple(dict.fromkeys(record.clause for record in self.failures if record.clause))
        shares = [max(record.shares.values(), default=0.0) for record in self.failures]
        exceeding = [share for share in shares if 1 < share < math.inf]
        # Least and largest error by its budget, of the failures whose error exceeds it.
        self.used = (min(exceeding), max(exceeding)) if exceeding else None
        # What is to be said behind its number of cases, where a likely cause stands beside it.
        self.cases = counted(len(self.failures), "more case" if self.kind == "further" else "case")
        self.reserve = ", possibly the same bug" if self.kind == "further" else ""
        least, most = (f"{share:.3g}" for share in self.used) if self.used else ("", "")
        used = f", {least} to {most} × its budget" if least != most else f", {most} × its budget" if most else ""
        self.extent = used + (f" (SPEC {', '.join(self.clauses)})" if self.clauses else "")
        self.headline = self.sentence + self.extent


def grouped(found: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """What has a key in common, in order of appearance."""
    groups: dict[_K, list[_T]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups


def causes(records: Sequence[Record]) -> tuple[Cause, ...]:
    """Of one backend's failures: likely ones first, then by their cases; last what it declares unsupported and runs."""
    alike = grouped((record for record in records if record.failed), _key).values()
    said = {sentence: list(chain(*groups)) for sentence, groups in grouped(alike, _sentence).items()}
    named = {sentence for sentence, group in said.items() if any(map(_named, group))}
    # Not those that leave open whether it is one of the others.
    likely = {one for one in named if not any(other in one for other in named - {one})}
    found, quiet = [], ("", UNASKED, UNWANTED)
    for sentence, group in said.items():
        # How many were compared with everything that is known, if that was in vain, or that time ran out.
        compared = next((f"; {each.explanation}" for each in group if each.explanation not in quiet), "")
        if unlike := sum(record.explanation == UNLIKE for record in group):
            compared = f", {UNLIKE}" + ("" if unlike == len(group) else f" ({unlike} of {len(group)} cases compared)")
        if any(record.is_explained for record in group):
            compared = ""
        is_undeclared = [record.check in (Check.UNDECLARED_SUPPORT, Check.UNSAFE_REFUSAL) for record in group]
        apart = not likely or _is_exception(group[0]) or is_undeclared[0]
        kind: CauseKind = "likely" if sentence in likely else "seen" if apart else "further"
        cause = Cause(sentence + compared, tuple(group), kind, circumstances(group, records))
        found.append(((all(is_undeclared), kind != "likely", -len(group)), cause))
    return tuple(cause for _, cause in sorted(found, key=lambda each: each[0]))


def _key(record: Record) -> tuple[str, str]:
    """What failures of one cause have in common: finding or explanation, the text of an exception, or what was seen."""
    if reported := _named(record):
        return "", reported
    seen = _NUMBER.sub("#", _PATH.sub("/…", _raised(record)[:MESSAGE])) if _is_exception(record) else symptom(record)
    return record.check or record.status, seen


def _named(record: Record) -> str:
    return record.finding or (record.explanation if record.is_explained else "")


def _sentence(group: Sequence[Record]) -> str:
    explained = next((record.explanation for record in group if record.is_explained), "")
    if not explained and _is_exception(group[0]):
        return _raised(min(group, key=simplicity))
    return explained or group[0].finding or symptom(group[0])


def _is_exception(record: Record) -> bool:
    return record.check == Check.CALL or record.status in (Status.CRASH, Status.TIMEOUT, Status.HARNESS_ERROR)


def _raised(record: Record) -> str:
    """What was raised, or what else ended the call, without where in the procedure."""
    text = record.message.removesuffix(f" (SPEC {record.clause})")
    return raised[1] if (raised := _RAISED.search(text)) else text


def raised_at(record: Record) -> str:
    """Where a kernel raised: the last place in its own file, else the last of all; empty if it did not."""
    if record.check != Check.CALL:
        return ""
    frames, own = _FRAME.findall(record.detail), record.reference.rpartition(":")[0]
    found = [frame for frame in frames if Path(frame[0]).name == Path(own).name and own.endswith(".py")] or frames
    return "raised at {}:{}, in {}".format(near(Path(found[-1][0])), *found[-1][1:]) if found else ""


def simplicity(record: Record) -> tuple[int, int, str]:
    """Fields that its case sets beside the defaults; then heads × tokens, old and new."""
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
_MASKED: dict[str, str] = {
    r"\boutput is nan\b": "the output is NaN where a number is expected",
    r"\boutput is -?inf\b": "the output is infinite where a number is expected",
    r"\boutput is \S+(?: 0)? where no key is visible": (
        "the output is not 0 where no key is visible, as in a request without tokens"
    ),
    r"\boutput is not 0 in \d+ rows of padding": "the output is not 0 in rows of padding",
    r"\bLSE is nan\b.*expected finite": "the LSE is NaN where a number is expected",
    r"\bLSE is -?inf\b.*expected finite": "the LSE is infinite where a number is expected",
    r"\bLSE is nan\b.*expected -inf": "the LSE is NaN where -inf is expected",
    r"\bLSE is inf\b.*expected -inf": "the LSE is +inf where -inf is expected",
    r"\bLSE is .*expected -inf": "the LSE is a number where -inf is expected",
}


def symptom(record: Record) -> str:
    """What is wrong with a result, as far as that is seen; the message of a failure that names no check."""
    if record.check == Check.MASK:
        return next((what for said, what in _MASKED.items() if re.search(said, record.message)), WRONG[Check.MASK])
    if record.check == Check.UNSAFE_REFUSAL and "returned a wrong result" in record.message:
        return "accepts a configuration it declares unsupported, and returns a wrong result"
    if ZERO in record.message:
        return ZERO
    return WRONG.get(record.check, record.check) if record.check else record.message


_FEWEST = 3  # failures that can have something in common by no accident
_MOST_PASSING = 4  # one of so many passing cases may have what all failures have, and it is still told


def circumstances(failures: Sequence[Record], records: Iterable[Record]) -> str:
    """What failures of one cause have in common that decides by itself, and how many such cases pass."""
    if len(failures) < _FEWEST:
        return ""
    failing = [Case.parse(record.case) for record in failures]
    least = min(_keys(case) for case in failing), min(case.heads for case in failing)
    common = _facts(failing[0], least)  # with the fields that decide each
    shared = frozenset(common).intersection(*(_facts(case, least) for case in failing))
    roles = {case.role for case in failing}
    passed = (r.case for r in records if r.status is Status.PASS and r.capability != EXPLORED)
    right = [case for case in map(Case.parse, passed) if case.role in roles]
    passing = [frozenset(_facts(case, least)) for case in right]
    without = {fact: [case for case, facts in zip(right, passing, strict=True) if fact not in facts] for fact in shared}
    shared = frozenset(fact for fact, others in without.items() if _decides(common[fact], failing, others))
    lacking = [facts & shared for facts in passing]
    # The fact, or the two, that fewest passing cases have, and how many; two where that is no more than half.
    found = []
    for count in (1, 2):
        options = map(frozenset, combinations(sorted(shared), count))
        having = ((facts, sum(facts <= each for each in lacking)) for facts in options)
        found.append(min(having, key=lambda each: each[1], default=(frozenset[str](), len(lacking))))
    one, two = found
    told, remaining = two if 2 * two[1] + 2 <= one[1] else one
    if remaining == len(lacking) or remaining > len(failing) or _MOST_PASSING * remaining > len(lacking):
        return ""
    return f"only with {' and '.join(sorted(told))}: {len(failing)} such cases fail so, {remaining} pass"


def _decides(fields: Sequence[str], failing: Sequence[Case], passing: Sequence[Case]) -> bool:
    """Whether a failing case and a passing one differ in these fields, and what goes with them, alone."""
    along = {"cache": ("kscale", "scales"), "quant": ("oscale",)}  # fields that mean something only with others
    aside = {"capability", "seed", *fields, *chain(*(along.get(name, ()) for name in fields))}

    def rest(case: Case) -> tuple[object, ...]:
        return case.role, *(getattr(case, name) for name in case.defaults() if name not in aside)

    return not {rest(case) for case in failing}.isdisjoint(map(rest, passing))


# Fields whose single values are no kind of case.
_MEASURES = ("capability", "seed", "q", "kv", "kscale", "oscale", "workspace", "spare", "model")


def _keys(case: Case) -> int:
    return max(map(sum, zip(case.q, case.kv or (0,) * len(case.q), strict=True)))


def _facts(case: Case, least: tuple[int, int]) -> dict[str, Sequence[str]]:
    """What kind of case it is, each fact with the fields that decide it; sizes by the least keys and heads."""
    values = {name: getattr(case, name) for name in case.defaults() if name not in _MEASURES}
    shapes: tuple[tuple[str, bool, Sequence[str]], ...] = (
        (f"{least[0]} keys or more", _keys(case) >= least[0], ("q", "kv")),
        (f"{least[1]} heads or more", case.heads >= least[1], ("heads",)),
        ("several requests", len(case.q) > 1, ("q", "kv")),
        ("several query tokens", max(case.q) > 1, ("q",)),
        ("different query lengths", len(set(case.q)) > 1, ("q",)),
        ("an empty context", 0 in case.kv, ("kv",)),
        ("odd numbers of heads", case.heads % 2 == 1, ("heads",)),
        ("heads between powers of two", bool(case.heads & (case.heads - 1)), ("heads",)),
    )
    named = {f"{name}={int(each) if isinstance(each, bool) else each}": (name,) for name, each in values.items()}
    return {**named, **{shape: fields for shape, holds, fields in shapes if holds}}


MOST_REQUESTS = 256  # cases of more requests are never compared


def advice(record: Record) -> str:
    """Where to look, or what to run; empty where something explains a failure or nothing more is known of it."""
    if record.looks_like == UNCOMPARED and len(Case.parse(record.case).q) <= MOST_REQUESTS:
        return "run this case alone, by its replay line: there it has the time to be compared with all of them"
    # The judge says so of an LSE that was asked for, whose every row is within its budget.
    if record.check == Check.OUTPUT and "; the LSE is right" in record.message and record.looks_like == UNLIKE:
        suspects = "V, at rescaling of the accumulator, or at the weights with which splits are merged"
        return f"the LSE is right, so scores, mask and scale are: look at {suspects}"
    return ""


_MOST_CAUSES, _INDENT = 3, " " * 5
_KEPT = "passes when run alone: the function keeps something from earlier calls (a plan, lengths, buffers)"
_KEPT += ", or equal calls give different results"


def function_lines(name: str, records: Sequence[Record], passes_alone: bool) -> Iterator[str]:
    """What is wrong with a test's function, whose simplest failure may pass alone; each reference is a test's id."""
    failing, found = tuple(record for record in records if record.failed), causes(records)
    head = f"{name}: {len(failing)} of {counted(len(records), 'case')} fail{'s' if len(failing) == 1 else ''}"
    common, test = "", ""
    if passes_alone:
        found, test = (Cause(_KEPT, failing),), failing[0].reference.partition("[")[0]
    else:
        common, likely = circumstances(failing, records), sum(cause.kind == "likely" for cause in found)
        head += f", {counted(likely, 'likely cause')}" if likely else ""
    yield from wrapped(head, columns(), further=_INDENT)
    yield from wrapped(common, columns(), _INDENT, _INDENT)
    for number, cause in enumerate(found[:_MOST_CAUSES], start=1):
        example, cases = cause.example, f"{number}. {counted(len(cause.failures), 'case')}{cause.reserve}: "
        said, _, _ = example.message.removesuffix(f" (SPEC {example.clause})").partition(", first at")
        seen = "" if example.is_explained or said.endswith(cause.sentence) else f"simplest: {cut(said)}"
        yield from wrapped(f"{'' if passes_alone else cases}{cut(cause.sentence)}", columns(), "  ", _INDENT)
        for detail in ("" if common else cause.only, seen, raised_at(example), advice(example)):
            yield from wrapped(detail, columns(), _INDENT, _INDENT)
        yield f"{_INDENT}replay: pytest {shlex.quote(test or example.reference)}"
    if hidden := sum(len(cause.failures) for cause in found[_MOST_CAUSES:]):
        yield f"  … and {counted(hidden, 'more case')}"
