"""Blame: whether a failure is its backend's own, seen by judging the case again in processes that have judged nothing.

The first failure of each capability of a backend is judged again alone. If it holds then, it is judged after what the
process that it failed in had judged of the same backend before: the last case, the last few, all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from mla_conformance.engine.messages import Judge
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status

ALONE: Final = "alone"
AFTER: Final = "after"
UNREPEATED: Final = "unrepeated"
MOST_EXPLAINED = 3
"""Capabilities of a backend whose first failure is explained."""
_FEW = 4
_REPEATS = 3


@dataclass
class Confirmation:
    """One failure on its way to being confirmed.

    Attributes:
        failure: the record.
        own: cases of the same backend that the same process had judged before.
        shared: names of other backends that the process had judged before.
        explain: whether it is to be explained, too.
        last: what the last attempt gave.
    """

    failure: Record
    own: Sequence[str]
    shared: Sequence[str]
    explain: bool
    last: Record | None = None

    @cached_property
    def attempts(self) -> Iterator[Judge]:
        """What to run, one after the other, until :meth:`settled` has an answer."""
        return self._attempts()

    def _attempts(self) -> Iterator[Judge]:
        befores: list[Sequence[str]] = [(), *(self.own[-count:] for count in (1, _FEW, len(self.own)) if self.own)]
        if self.shared:
            befores += [()] * (_REPEATS - 1)
        seen: list[Sequence[str]] = []
        for before in befores:
            if not before or before not in seen:
                seen.append(before)
                yield Judge(self.failure.reference, self.failure.case, tuple(before), fresh=True, explain=self.explain)

    def settled(self, attempt: Judge, again: Record) -> Record | None:
        """The record if this attempt decides; None if it does not."""
        self.last = again
        if not again.failed or again.case != self.failure.case:  # it may have died of a case before
            return None
        found = replace(again, capability=self.failure.capability)
        if self.failure.key == EXPLORED:
            found = replace(found, message=self.failure.message)  # which tells what the case was made of
        if not attempt.before:
            return replace(found, confirmation=ALONE)
        return replace(found, confirmation=AFTER, after=attempt.before)

    def unrepeated(self) -> Record:
        """The record if no attempt failed.

        Where the process had been used by other backends, the failure may be of what they left behind; a backend
        answers for itself, so the verdict of the fresh processes stands, and says what had happened.
        """
        if not self.shared or self.last is None or self.last.status is not Status.PASS:
            return replace(self.failure, confirmation=UNREPEATED)
        what = (
            f"failed once ({self.failure.message}) in a process that {', '.join(self.shared)} had used before; "
            "passed whenever it was run in a process of its own"
        )
        return replace(self.last, capability=self.failure.capability, message=what, confirmation=UNREPEATED)
