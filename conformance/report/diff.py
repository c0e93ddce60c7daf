"""What changed between two reports."""

from collections.abc import Iterator
from dataclasses import dataclass

from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary, RunSummary, worst

DRIFT_FACTOR = 2.0
DRIFT_FLOOR = 0.1
"""Below this share of the budget an error is noise, whatever its factor."""


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        kind: what happened.
        subject: backend, and case where it is about one.
        detail: the values before and after.
        regression: whether it makes the second report worse.
    """

    kind: str
    subject: str
    detail: str
    regression: bool = False


def compare(before: RunSummary, after: RunSummary, factor: float = DRIFT_FACTOR) -> list[Change]:
    """Changes from one report to the next, regressions first.

    Regressions are cases that fail newly, cases that passed and were not judged again, backends that are gone or
    unavailable, and errors that grew by more than ``factor`` to at least a tenth of the budget. A case that left the
    list is none.
    """
    old = {backend.name: backend for backend in before.backends}
    new = {backend.name: backend for backend in after.backends}
    changes = [Change("backend added", name, new[name].outcome) for name in new if name not in old]
    for name, backend in old.items():
        if name not in new:
            changes.append(Change("backend removed", name, f"was {backend.outcome}", regression=not backend.reasons))
        elif new[name].reasons and not backend.reasons:
            changes.append(Change("no longer available", name, "; ".join(new[name].reasons), regression=True))
        elif not new[name].reasons:
            changes += _cases(backend, new[name], set(before.judged_cases), set(after.judged_cases), factor)
    return sorted(changes, key=lambda change: not change.regression)


def _cases(
    old: BackendSummary, new: BackendSummary, listed_before: set[str], listed_after: set[str], factor: float
) -> Iterator[Change]:
    before, after = ({record.key: record for record in backend.records} for backend in (old, new))
    for case in dict.fromkeys([*before, *after]):
        subject = f"{new.name} {case}"
        if case == EXPLORED:
            yield from _case(subject, before.get(case), after.get(case), factor)
        elif case not in listed_after:
            yield Change("case removed", subject, f"was {before[case].status}")
        elif case not in listed_before:
            failed = after[case].failed
            yield Change("case added", subject, _told(after[case]), regression=failed)
        else:
            yield from _case(subject, before.get(case), after.get(case), factor)


def _case(subject: str, old: Record | None, new: Record | None, factor: float) -> Iterator[Change]:
    was_failing, was_passing = bool(old and old.failed), bool(old and old.status is Status.PASS)
    if new and new.failed:
        if not was_failing:
            yield Change("newly failing", subject, _told(new), regression=True)
    elif was_passing and (new is None or new.status is not Status.PASS):
        yield Change("no longer judged", subject, _told(new), regression=True)
    elif new and new.status is Status.PASS and not was_passing:
        yield Change("newly passing", subject, f"was {old.status if old else 'not run'}")
    elif old and new and was_passing:
        yield from _drift(subject, worst(old.used.values()), worst(new.used.values()), factor)


def _drift(subject: str, old: float, new: float, factor: float) -> Iterator[Change]:
    shares = f"{old:.3f} → {new:.3f} of the budget"
    if new >= DRIFT_FLOOR and new > factor * old:
        yield Change("error grew", subject, shares, regression=True)
    elif old >= DRIFT_FLOOR and old > factor * new:
        yield Change("error shrank", subject, shares)


def _told(record: Record | None) -> str:
    if record is None:
        return "not run"
    return f"{record.status}: {record.message}" if record.message else record.status.value
