"""``minimize``: the simplest case that fails as a given one does; a worker that judges candidates may die of it."""

from collections.abc import Callable
from dataclasses import dataclass

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.judging.record import Record


class NothingToMinimize(ValueError):
    """The given case does not fail."""


@dataclass(frozen=True)
class Minimum:
    """What a minimisation found.

    Attributes:
        case: no step makes it simpler and keeps status and check of its failure, unless the tries ran out.
        record: of that case.
        tries: candidates that were judged.
        complete: every simpler candidate was tried.
    """

    case: Case
    record: Record
    tries: int
    complete: bool


def minimize(case: Case, judge: Callable[[Case], Record], limit: int) -> Minimum:
    """Take every step that keeps the failure, until none is left or ``limit`` candidates were judged.

    Raises:
        NothingToMinimize: the case itself does not fail.
    """
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
