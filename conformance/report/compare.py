"""What changed from one run to another: the one rule by which reports are compared, by `report diff` and by the gate.

Compared is what the kernels did, as judged, before any expectation. An error grew or shrank if the share of its budget
that some rule used did, by more than a given share: 1 is the whole budget, so the limit means the same for every case.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from mla_conformance.backends.foreign import cut
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary, RunSummary

DRIFT = 0.1
"""Share of the error budget by which an error may grow before it counts."""


class ChangeKind(StrEnum):
    """What happened, regressions first."""

    BACKEND_REMOVED = "backend removed"
    NO_LONGER_AVAILABLE = "no longer available"
    NEWLY_FAILING = "newly failing"
    LOST = "no longer judged"
    GREW = "error grew"
    CASE_REMOVED = "case removed"
    SHRANK = "error shrank"
    NEWLY_PASSING = "newly passing"
    CASE_ADDED = "case added"
    BACKEND_ADDED = "backend added"


_REGRESSIONS = (
    ChangeKind.BACKEND_REMOVED,
    ChangeKind.NO_LONGER_AVAILABLE,
    ChangeKind.NEWLY_FAILING,
    ChangeKind.LOST,
    ChangeKind.GREW,
)


@dataclass(frozen=True)
class Change:
    """One difference."""

    kind: ChangeKind  # what happened
    backend: str  # name of the backend
    key: str  # key of the record, or empty for a change of the whole backend
    detail: str  # the values before and after

    @property
    def subject(self) -> str:
        """Backend, and case where it is about one."""
        return f"{self.backend} {self.key}".rstrip()

    @property
    def regression(self) -> bool:
        """Whether it makes the second run worse."""
        return self.kind in _REGRESSIONS

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{'✘' if self.regression else '·'} {self.kind}: {self.subject} · {cut(self.detail)}"


def compare(before: RunSummary, after: RunSummary, drift: float = DRIFT) -> list[Change]:
    """Changes from one run to the next, regressions first.

    Args:
        before: the earlier run.
        after: the later run.
        drift: share of the error budget by which an error has to grow or shrink to be a change.
    """
    old = {backend.name: backend for backend in before.backends if not backend.reasons}
    new = {backend.name: backend for backend in after.backends}
    known = {backend.name for backend in before.backends}
    changes = [Change(ChangeKind.BACKEND_ADDED, name, "", new[name].outcome) for name in new if name not in known]
    listed = set(before.judged_cases), set(after.judged_cases)
    for name in new:
        if name in known and not new[name].reasons:
            changes += _records(old.get(name, BackendSummary(new[name].facts)), new[name], *listed, drift)
    for name, backend in old.items():
        if name not in new:
            changes.append(Change(ChangeKind.BACKEND_REMOVED, name, "", f"was {backend.outcome}"))
        elif new[name].reasons:
            changes.append(Change(ChangeKind.NO_LONGER_AVAILABLE, name, "", "; ".join(new[name].reasons)))
    order = list(ChangeKind)
    return sorted(changes, key=lambda change: order.index(change.kind))


def suites_differ(before: RunSummary, after: RunSummary) -> str:
    """What of two runs by different suites can be compared, in a sentence; empty for two runs by one."""
    was, now = before.environment["suite"], after.environment["suite"]
    if was == now:
        return ""
    common, listed = len(set(before.cases) & set(after.cases)), len(after.cases)
    return (
        f"suite {was} before, {now} after: a verdict may differ because the judge does. {common} of {listed} cases "
        "are in both lists, on the same inputs; the others cannot be compared"
    )


def _records(
    old: BackendSummary, new: BackendSummary, listed_before: set[str], listed_after: set[str], drift: float
) -> Iterator[Change]:
    before, after = ({record.key: record.as_judged for record in backend.records} for backend in (old, new))
    for key in dict.fromkeys([*before, *after]):
        kind, detail = _change(before.get(key), after.get(key), drift)
        if key != EXPLORED and key not in listed_after:
            kind, detail = ChangeKind.CASE_REMOVED, f"was {before[key].status}"
        elif key != EXPLORED and key not in listed_before and kind is not ChangeKind.NEWLY_FAILING:
            kind, detail = ChangeKind.CASE_ADDED, _told(after.get(key))
        if kind:
            yield Change(kind, new.name, key, detail)


def _change(old: Record | None, new: Record | None, drift: float) -> tuple[ChangeKind | None, str]:
    was, now = old.status if old else None, new.status if new else None
    if new and new.failed:
        return (None, "") if old and old.failed else (ChangeKind.NEWLY_FAILING, _told(new))
    if was is Status.PASS and now is not Status.PASS:
        return ChangeKind.LOST, f"was pass, now {_told(new)}"
    if now is Status.PASS and was is not Status.PASS:
        return ChangeKind.NEWLY_PASSING, f"was {was or 'not run'}"
    return _drift(old, new, drift) if old and new else (None, "")


def _drift(old: Record, new: Record, drift: float) -> tuple[ChangeKind | None, str]:
    """How the use of the budget changed by the rule by which it changed most; only that of passes is compared."""
    if not old.status is new.status is Status.PASS:
        return None, ""
    shares = {rule: (old.shares.get(rule, 0.0), new.shares.get(rule, 0.0)) for rule in {**old.used, **new.used}}
    by_growth = sorted(shares.items(), key=lambda item: item[1][1] - item[1][0])
    for kind, (rule, (was, now)) in zip(
        (ChangeKind.GREW, ChangeKind.SHRANK), (by_growth[-1:] + by_growth[:1]), strict=False
    ):
        if (now - was if kind is ChangeKind.GREW else was - now) > drift:
            return kind, f"{rule}: {was:.2f} → {now:.2f} of the error budget"
    return None, ""


def _told(record: Record | None) -> str:
    if record is None:
        return "not run"
    return f"{record.status}: {record.message}" if record.message else record.status.value
