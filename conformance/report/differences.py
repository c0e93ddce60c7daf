"""What is other than before: the one rule for two runs, as judged before any expectation, two records and two locks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any, TypeVar

from mla_conformance.backends.foreign import cut
from mla_conformance.judging.record import EXPLORED, FAILED, Record, Status
from mla_conformance.report.summary import BackendSummary, RunSummary

_K = TypeVar("_K")
SHOWN = 20  # changes of a kind
DRIFT = 0.1  # share of the error budget by which an error may grow before it counts


def differing(before: Mapping[_K, Any], after: Mapping[_K, Any]) -> Iterator[tuple[_K, Any, Any]]:
    """Every (name, value before, value after) in which two tables differ; None stands for a missing value."""
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def differences(before: Any, after: Any, place: str = "report") -> Iterator[tuple[str, Any, Any]]:
    """The same of two JSON values, down to the innermost places that differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, old, new in differing(before, after):
            yield from differences(old, new, f"{place}.{name}")
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif before != after:
        yield place, before, after


def contradicts(stated: Status, found: Status | None) -> bool:
    """Whether a verdict speaks against the stated one of a case: not how it fails, nor that a device lacks memory."""
    known = stated is Status.EXPECTED_FAILURE and found in FAILED
    return found is not stated and not known and Status.UNAVAILABLE not in (stated, found)


class ChangeKind(StrEnum):
    """What happened from one run to another, the worst first."""

    BACKEND_REMOVED = "backend removed"
    NO_LONGER_AVAILABLE = "no longer available"
    NEWLY_FAILING = "newly failing"
    LOST = "no longer judged"
    GREW = "error grew"
    CASE_REMOVED = "case removed"  # from here on, no regression
    SHRANK = "error shrank"
    NEWLY_PASSING = "newly passing"
    CASE_ADDED = "case added"
    BACKEND_ADDED = "backend added"


_ORDER = list(ChangeKind)


@dataclass
class Change:
    kind: ChangeKind
    backend: str
    key: str  # of the record, or empty for a change of the whole backend
    detail: str  # the values before and after

    def __post_init__(self) -> None:
        self.regression = _ORDER.index(self.kind) < _ORDER.index(ChangeKind.CASE_REMOVED)
        sign = "✘" if self.regression else "·"
        self.line = f"{sign} {self.kind}: {f'{self.backend} {self.key}'.rstrip()} · {cut(self.detail)}"


def compare(before: RunSummary, after: RunSummary, drift: float = DRIFT) -> list[Change]:
    """Changes from one run to the next, regressions first; an error has to grow or shrink by ``drift`` to be one."""
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
    return sorted(changes, key=lambda change: _ORDER.index(change.kind))


def change_lines(changes: Iterable[Change], all_regressions: bool = True) -> Iterator[str]:
    """Of each kind some changes, or all if they are regressions, and how many more there are."""
    for kind, group in groupby(changes, key=lambda change: change.kind):
        of_kind = list(group)
        shown = of_kind if all_regressions and of_kind[0].regression else of_kind[:SHOWN]
        yield from (change.line for change in shown)
        if hidden := len(of_kind) - len(shown):
            yield f"  … and {hidden} more {kind}"


def suites_differ(before: RunSummary, after: RunSummary) -> str:
    """What of two runs by different suites can be compared, in a sentence; empty for two runs by one."""
    was, now = before.environment["suite"], after.environment["suite"]
    if was == now:
        return ""
    common, listed = len(set(before.cases) & set(after.cases)), len(after.cases)
    both = f"{common} of {listed} cases are in both lists, on the same inputs; the others cannot be compared"
    return f"suite {was} before, {now} after: a verdict may differ because the judge does. {both}"


def _records(
    old: BackendSummary, new: BackendSummary, listed_before: set[str], listed_after: set[str], drift: float
) -> Iterator[Change]:
    before, after = ({record.key: record.as_judged for record in backend.records} for backend in (old, new))
    for key in dict.fromkeys([*before, *after]):
        told = ": ".join(filter(None, (now.status, now.message))) if (now := after.get(key)) else "not run"
        kind, detail = _change(before.get(key), now, told, drift)
        if key != EXPLORED and key not in listed_after:
            kind, detail = ChangeKind.CASE_REMOVED, f"was {before[key].status}"
        elif key != EXPLORED and key not in listed_before and kind is not ChangeKind.NEWLY_FAILING:
            kind, detail = ChangeKind.CASE_ADDED, told
        if kind:
            yield Change(kind, new.name, key, detail)


def _change(old: Record | None, new: Record | None, told: str, drift: float) -> tuple[ChangeKind | None, str]:
    """What became of a case; the use of the budget is compared of passes alone, by the rule that changed most."""
    was, now = old.status if old else None, new.status if new else None
    if new and new.failed:
        return (None, "") if old and old.failed else (ChangeKind.NEWLY_FAILING, told)
    if was is Status.PASS and now is not Status.PASS:
        return ChangeKind.LOST, f"was pass, now {told}"
    if now is Status.PASS and was is not Status.PASS:
        return ChangeKind.NEWLY_PASSING, f"was {was or 'not run'}"
    if old and new and was is Status.PASS:
        shares = {rule: (old.shares.get(rule, 0.0), new.shares.get(rule, 0.0)) for rule in {**old.used, **new.used}}
        by_growth = sorted(shares.items(), key=lambda item: item[1][1] - item[1][0])
        for kind, sign, changed in ((ChangeKind.GREW, 1, by_growth[-1:]), (ChangeKind.SHRANK, -1, by_growth[:1])):
            for rule, (before, after) in changed:
                if sign * (after - before) > drift:
                    return kind, f"{rule}: {before:.2f} → {after:.2f} of the error budget"
    return None, ""
