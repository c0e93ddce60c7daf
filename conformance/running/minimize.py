"""``minimize``: the simplest case that fails as a given one does, each candidate judged out of process."""

from collections.abc import Callable
from dataclasses import dataclass

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.trials.execute import failing

Signature = tuple[Status, Check | None]


class NothingToMinimize(ValueError):
    """The given case does not fail."""


@dataclass(frozen=True)
class Minimum:
    """What a minimisation found.

    Attributes:
        case: no step makes it simpler and keeps its signature, unless the tries ran out.
        verdict: of that case.
        tries: candidates that were judged.
        complete: every simpler candidate was tried.
    """

    case: Case
    verdict: Verdict
    tries: int
    complete: bool


def signature(verdict: Verdict) -> Signature:
    """What two failures must share to be the same failure."""
    return verdict.status, verdict.check


def minimize(case: Case, judge: Callable[[Case], Verdict], limit: int) -> Minimum:
    """Take every step that keeps the failure, until none is left or ``limit`` candidates were judged.

    Raises:
        NothingToMinimize: the case itself does not fail.
    """
    verdict = judge(case)
    if not failing(verdict):
        raise NothingToMinimize(f"expected a case that fails, got {verdict.status} of {case.id}")
    wanted, tried = signature(verdict), {case}
    found = case
    while step := next((c for c in simpler(found) if c not in tried), None):
        if len(tried) > limit:
            return Minimum(found, verdict, len(tried), complete=False)
        tried.add(step)
        outcome = judge(step)
        if signature(outcome) == wanted:
            found, verdict = step, outcome
    return Minimum(found, verdict, len(tried), complete=True)
