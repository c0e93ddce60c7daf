"""Blame: whether a failure is its backend's own, seen by judging the case again in processes that have judged nothing.

If it passes alone, it is judged behind what its process had judged of the same backend: the last case, the last few,
all, then fewer by bisection; and if that passes, behind everything, so that another backend left it behind.
What explains one failure is tried on the backend's others, too; it is claimed of those only that it fits. Or a failure
is minimised: the simplest case is sought that fails as a given one does.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import accumulate
from time import monotonic

from mla_conformance.cases.case import Case
from mla_conformance.cases.work import simpler
from mla_conformance.engine.messages import Judge
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import COMPARED, EXPLORED, INDISTINCT, UNCOMPARED, Record, RecordKey, Status

MOST_EXPLAINED = 3  # kinds of a backend's failures of each of which the first one is explained
_FEW = 4
_SHORTER = 12  # attempts to find fewer cases after which a failure repeats, each in a process: enough for one of 1000
_SHORTENING = 120.0  # seconds after which no further one begins: each may judge nearly all of a long history once more
_OPEN = ("", UNCOMPARED, INDISTINCT)  # the explanations of failures that may still turn out to look like another one
_PATIENCE = 15.0  # seconds that a backend's failures may have taken that are compared with what explains another one
History = tuple[RecordKey, ...]
Attempts = Generator[Judge, Record, Record]
"""What to run, one after the other; it is sent the record of each, and returns the one that settles a failure."""


def confirmation(failure: Record, history: Sequence[RecordKey], explain: bool, unhurried: bool = False) -> Attempts:
    """Judge a failure alone, after its backend's own history, after less of that once it fails, or after all."""

    def judged(before: History) -> Judge:
        about = failure.reference, failure.case, before
        return Judge(*about, fresh=True, explain=explain, unhurried=explain and unhurried)

    def repeats(again: Record) -> bool:
        """Whether it is this case that failed: the process may have died of a case before it."""
        return again.failed and again.case == failure.case

    again = alone = yield judged(())
    after: History = ()
    passed = 0
    own = tuple(done for done in history if done[0] == failure.reference and done[1])
    for count in sorted({min(count, len(own)) for count in (1, _FEW, len(own))} - {0}):
        if repeats(again):
            break
        passed, after = len(after), own[-count:]
        again = yield judged(after)
    if repeats(again):
        found = again.with_fields(capability=failure.capability)
        if failure.key == EXPLORED:  # whose message tells what the case was made of
            found = found.with_fields(message=failure.message)
        if not after:
            return found.with_fields(confirmation="alone")
        after = yield from _shortest(found, after, passed)
        return found.with_fields(confirmation="after", after=tuple(case for _, case in after))
    if others := dict.fromkeys(reference for reference, _ in history if reference != failure.reference):
        again = yield judged(tuple(history))
        if repeats(again):
            # The verdict of the case alone, for a backend answers for itself; it says what had happened.
            where = f"where {', '.join(others)} had used the process before, and once more after the same"
            what = f"failed ({failure.message}) {where}; passed in a process of its own"
            return alone.with_fields(capability=failure.capability, message=what, confirmation="unrepeated")
    return failure.with_fields(confirmation="unrepeated")


def _shortest(found: Record, failing: History, passed: int) -> Generator[Judge, Record, History]:
    """Fewer cases of a failing history, of whose last ``passed`` alone it is known that the failure needs more.

    Bisection finds the latest case that the failure needs, given all that follow it. If that case alone does not make
    it fail, the next one is sought among those that follow.
    """
    until, needed, rest = monotonic() + _SHORTENING, History(), failing
    low, high = 0, len(rest) - passed  # behind what is needed it fails after rest[low:], and passes after rest[high:]
    for _ in range(_SHORTER):
        middle = (low + high) // 2
        is_found = middle == low
        before = (*needed, rest[low]) if is_found else (*needed, *rest[middle:])
        if len(failing) == 1 or before == failing or monotonic() >= until:
            break
        again = yield Judge(found.reference, found.case, before, fresh=True)
        fails = (again.case, again.status, again.check) == (found.case, found.status, found.check)
        failing = before if fails else failing
        if not is_found:
            low, high = (middle, high) if fails else (low, middle)
        elif fails:
            break
        else:
            needed, rest, low, high = before, rest[low + 1 :], 0, len(rest) - low - 1
    return failing


def comparisons(records: Iterable[Record]) -> list[Judge]:
    failures = sorted((record for record in records if record.status is Status.FAIL), key=lambda each: each.seconds)
    reported = tuple(dict.fromkeys(record.explanation for record in failures if record.is_explained))
    pending = [x for x in failures if x.explanation in _OPEN and x.check in COMPARED and x.key == x.case]
    spent = accumulate(record.seconds for record in pending)
    affordable = [record for record, seconds in zip(pending, spent, strict=True) if seconds <= _PATIENCE]
    return [Judge(each.reference, each.case, explain=True, reported=reported) for each in affordable if reported]


def compared(failure: Record, again: Record) -> Record | None:
    """The failure with the explanation that fits it, too, or with the end of that; None if it fails otherwise now."""
    if (again.case, again.check) != (failure.case, failure.check) or not again.explanation:
        return None
    return failure.with_fields(explanation=again.explanation)


def minimize(case: Case, judge: Callable[[Case], Record], limit: int) -> tuple[Case, Record, int, bool]:
    """Take every step that keeps status and check of a failure, until none is left or ``limit`` candidates were judged.

    The case and its record, how many were judged, and whether no step makes it simpler.
    """
    record = judge(case)
    if not record.failed:
        raise InputError(f"minimize: expected a case that fails, got {record.status} of {case.id}")
    wanted, tried = (record.status, record.check), {case}
    found = case
    while step := next((c for c in simpler(found) if c not in tried), None):
        if len(tried) > limit:
            return found, record, len(tried), False
        tried.add(step)
        outcome = judge(step)
        if (outcome.status, outcome.check) == wanted:
            found, record = step, outcome
    return found, record, len(tried), True
