"""Cases near a failing one, where a cause has to pass and fail as the backend does.

On one case a mistake gives the numbers of a narrower one, or by chance those of another: codes without their scale are
the same whether that is so of every page or of large ones. Where else a backend fails tells them apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.cases.work import work_of
from mla_conformance.diagnosis.candidates import Candidate
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import COMPARED, Status
from mla_conformance.vocabulary.capabilities import find_capability

_LISTED = 12
_Outcome = str | None  # the check of numbers that failed, nothing if the case passed; None if neither is known


def neighbours(case: Case) -> list[Case]:
    """The boldest simpler case of each field, and those of the capability that differ in fewest; light ones first."""
    steps: dict[tuple[str, ...], Case] = {}
    for step in simpler(case):
        steps.setdefault(_differing(step, case), step)
    listed = (each for each in find_capability(case.capability).cases if each.role is case.role and each != case)
    nearest = sorted(listed, key=lambda each: (len(_differing(each, case)), work_of(each)))[:_LISTED]
    return sorted({*steps.values(), *nearest}, key=lambda each: (work_of(each), each.id))


def _differing(one: Case, other: Case) -> tuple[str, ...]:
    return tuple(name for name in one.defaults() if getattr(one, name) != getattr(other, name))


def outcome(record: Record) -> _Outcome:
    """What a record says of its case."""
    return record.check if record.status is Status.PASS or record.check in COMPARED else None


def holding(
    fitting: Sequence[Candidate],
    case: Case,
    observed: Callable[[Case], _Outcome],
    suspected: Callable[[Candidate, Case], _Outcome],
    is_numeric: bool = True,
) -> list[Candidate]:
    """The candidates that give a backend's numbers on a case and its outcomes nearby.

    Without numbers, where all that is wrong is NaN, it comes first whether large numbers where nothing may be read do
    harm, too.
    """
    found = list(fitting)
    unlike = [] if is_numeric or case.poison == "large" else [replace(case, poison="large")]
    for near in [*unlike, *neighbours(case)] if found else ():
        seen = observed(near) if found else None
        if seen is not None:
            found = [each for each in found if suspected(each, near) in (seen, None)]
    return found
