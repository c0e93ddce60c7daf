"""Blame: whether a failure is its backend's own, seen by judging the case again in processes that have judged nothing.

The first failure of each capability of a backend is judged again alone. If it passes then, it is judged after what the
process that it failed in had judged of the same backend before: the last case, the last few, all. If it fails, fewer of
these cases are tried, found by bisection. If it passes, it is judged after everything that the process had done: what
fails only then is of what another backend left behind.

What explains one failure is tried on the backend's others, too; it is claimed of those only that it fits. Or a failure
is minimised: the simplest case is sought that fails as a given one does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from time import monotonic
from typing import Final

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.engine.messages import Judge
from mla_conformance.judging.record import EXPLORED, INDISTINCT, UNCOMPARED, Record, RecordKey
from mla_conformance.judging.verdict import COMPARED, Status

ALONE: Final = "alone"
AFTER: Final = "after"
UNREPEATED: Final = "unrepeated"
MOST_EXPLAINED = 3  # kinds of a backend's failures of each of which the first one is explained
_FEW = 4
_SHORTER = 12
"""Attempts to find fewer cases after which a failure repeats, each in a process of its own: enough for one of 1000."""
_SHORTENING = 120.0  # seconds after which no further one begins: each may judge nearly all of a long history once more
_OPEN = ("", UNCOMPARED, INDISTINCT)  # the explanations of failures that may still turn out to look like another one
_PATIENCE = 15.0  # seconds that a backend's failures may have taken that are compared with what explains another one


@dataclass
class FailureConfirmation:
    failure: Record
    # what the same process had done before: (backend reference, case id), without a case an import
    history: Sequence[RecordKey]
    explain: bool  # whether it is to be explained, too; unhurried if that may take as long as it takes
    unhurried: bool = False
    alone: Record | None = None  # what the case gave in a process of its own
    _repeated: Record | None = field(default=None, init=False)
    _fails: bool = field(default=False, init=False)

    @cached_property
    def attempts(self) -> Iterator[Judge]:
        """What to run, one after the other, until :meth:`settled` has an answer or nothing is left."""
        for before in self._histories():
            explain = self.explain and self._repeated is None  # a shorter history changes no explanation
            failure, unhurried = self.failure, explain and self.unhurried
            yield Judge(failure.reference, failure.case, before, fresh=True, explain=explain, unhurried=unhurried)

    def _histories(self) -> Iterator[tuple[RecordKey, ...]]:
        """What to run before the case: nothing, its backend's cases, fewer of them once it fails, or everything."""
        yield ()
        own = tuple(done for done in self.history if self._is_own(done) and done[1])
        passed = 0
        for count in sorted({min(count, len(own)) for count in (1, _FEW, len(own))} - {0}):
            yield own[-count:]
            if self._repeated:
                until = monotonic() + _SHORTENING
                for shorter in islice(self._shorter(own[-count:], passed), _SHORTER):
                    if monotonic() >= until:
                        break
                    yield shorter
                return
            passed = count
        if not all(map(self._is_own, self.history)):
            yield tuple(self.history)

    def _shorter(self, failing: tuple[RecordKey, ...], passed: int) -> Iterator[tuple[RecordKey, ...]]:
        """Parts of a failing history, of whose last ``passed`` cases alone it is known that the failure needs more.

        Bisection finds the latest case that the failure needs, given all that follow it. If that case alone does not
        make it fail, the next one is sought among those that follow.
        """
        needed: tuple[RecordKey, ...] = ()
        while failing:
            low, high = 0, len(failing) - passed  # it fails after failing[low:], and passes after failing[high:]
            while high - low > 1:
                middle = (low + high) // 2
                yield (*needed, *failing[middle:])
                low, high = (middle, high) if self._fails else (low, middle)
            needed, failing, passed = (*needed, failing[low]), failing[low + 1 :], 0
            if failing:
                yield needed
                if self._fails:
                    return

    def _is_own(self, done: RecordKey) -> bool:
        return done[0] == self.failure.reference

    def settled(self, attempt: Judge, again: Record) -> Record | None:
        """The record if this attempt decides; None if it does not, or if a shorter history may do."""
        if not attempt.before:
            self.alone = again
        # It is this case that failed, and as before: the process may have died of a case before it.
        found = self._repeated
        self._fails = again.failed and again.case == self.failure.case
        self._fails = self._fails and (not found or (again.status, again.check) == (found.status, found.check))
        if not self._fails:
            return None
        if not all(map(self._is_own, attempt.before)):
            # The verdict of the case alone, for a backend answers for itself; it says what had happened.
            others = dict.fromkeys(reference for reference, _ in self.history if reference != self.failure.reference)
            what = (
                f"failed ({self.failure.message}) where {', '.join(others)} had used the process before, and once more "
                "after the same; passed in a process of its own"
            )
            assert self.alone is not None
            capability = self.failure.capability
            return self.alone.with_fields(capability=capability, message=what, confirmation=UNREPEATED)
        if self._repeated is None:
            self._repeated = again.with_fields(capability=self.failure.capability)
            if self.failure.key == EXPLORED:  # whose message tells what the case was made of
                self._repeated = self._repeated.with_fields(message=self.failure.message)
        if not attempt.before:
            return self._repeated.with_fields(confirmation=ALONE)
        after = tuple(case for _, case in attempt.before)
        self._repeated = self._repeated.with_fields(confirmation=AFTER, after=after)
        return self._repeated if len(after) == 1 else None

    def outcome(self) -> Record:
        """The record once nothing is left to attempt: with the shortest history after which the case failed, if any."""
        return self._repeated or self.failure.with_fields(confirmation=UNREPEATED)


def comparisons(records: Iterable[Record]) -> list[Judge]:
    """What to run to see which failures of one backend look like those that are explained; quick ones first."""
    failures = sorted((record for record in records if record.status is Status.FAIL), key=lambda each: each.seconds)
    reported = tuple(dict.fromkeys(record.explanation for record in failures if record.is_explained))
    pending = [
        each for each in failures if each.explanation in _OPEN and each.check in COMPARED and each.key == each.case
    ]
    spent = accumulate(record.seconds for record in pending)
    affordable = [record for record, seconds in zip(pending, spent, strict=True) if seconds <= _PATIENCE]
    return [Judge(each.reference, each.case, explain=True, reported=reported) for each in affordable if reported]


def compared(failure: Record, again: Record) -> Record | None:
    """The failure with the explanation that fits it, too, or with the end of that; None if it fails otherwise now."""
    if (again.case, again.check) != (failure.case, failure.check) or not again.explanation:
        return None
    return failure.with_fields(explanation=again.explanation)


class NothingToMinimize(ValueError):
    """The given case does not fail."""


@dataclass(frozen=True)
class Minimum:
    """A case that no step makes simpler and that keeps status and check of its failure, unless the tries ran out."""

    case: Case
    record: Record
    tries: int
    complete: bool


def minimize(case: Case, judge: Callable[[Case], Record], limit: int) -> Minimum:
    """Take every step that keeps the failure, until none is left or ``limit`` candidates were judged."""
    record = judge(case)
    if not record.failed:
        raise NothingToMinimize(f"expected a case that fails, got {record.status} of {case.id}")
    wanted, tried = (record.status, record.check), {case}
    found = case
    while step := next((c for c in simpler(found) if c not in tried), None):
        if len(tried) > limit:
            return Minimum(found, record, len(tried), complete=False)
        tried.add(step)
        outcome = judge(step)
        if (outcome.status, outcome.check) == wanted:
            found, record = step, outcome
    return Minimum(found, record, len(tried), complete=True)
