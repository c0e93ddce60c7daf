"""The gate: whether a run may be merged, judged by its report, a baseline, the expectations and a must-pass list."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.files.inputs import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.compare import DRIFT, Change, Kind, compare
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability, summarise


class Finding(StrEnum):
    """What a gate finds, in the order in which it is shown."""

    INCOMPLETE = "not run"
    FAILING = "failing"
    NEWLY_FAILING = "newly failing"
    LOST = "no longer judged"
    UNEXPECTED_PASS = "unexpected pass"
    MUST_PASS = "must pass"
    EXPECTATION = "expectation"
    NEWLY_PASSING = "newly passing"
    DRIFTED = "drifted"


_CHANGES = {
    Kind.BACKEND_REMOVED: Finding.LOST,
    Kind.NO_LONGER_AVAILABLE: Finding.LOST,
    Kind.CASE_REMOVED: Finding.LOST,
    Kind.LOST: Finding.LOST,
    Kind.NEWLY_PASSING: Finding.NEWLY_PASSING,
    Kind.GREW: Finding.DRIFTED,
}
"""What the gate shows of the changes since the baseline; what fails newly it shows among the failures."""
_INFORMATION = (Finding.NEWLY_PASSING, Finding.DRIFTED)


@dataclass(frozen=True)
class Row:
    """One line of the gate's table."""

    finding: Finding
    backend: str
    what: str
    detail: str


@dataclass(frozen=True)
class Gate:
    """Everything that a gate decides by.

    Attributes:
        reports: the run; several reports are shards or backends of one run.
        expectations: known failures.
        baseline: the reports of an earlier run to compare with.
        must_pass: what has to be passed.
        max_drift: growth of an error, as a share of its budget, that blocks; None shows what grew without blocking.
    """

    reports: Sequence[RunSummary]
    expectations: Expectations
    baseline: Sequence[RunSummary] = ()
    must_pass: MustPass | None = None
    max_drift: float | None = None

    def rows(self) -> list[Row]:
        """Everything found, by kind.

        Raises:
            InputError: reports that do not belong together.
        """
        _require_alike([*self.reports, *self.baseline])
        now = _joined(self.reports, self.expectations)
        changes = self._changes(now)
        found = [*_incomplete(self.reports), *self._failures(now, changes), *self._outdated()]
        found += [Row(_CHANGES[c.kind], c.backend, c.key or "*", c.detail) for c in changes if c.kind in _CHANGES]
        for backend in now.backends if self.must_pass else ():
            assert self.must_pass
            records = {record.key: record for record in backend.records}
            found += [Row(Finding.MUST_PASS, backend.name, *missing) for missing in self.must_pass.missing(records)]
        return sorted(found, key=lambda row: list(Finding).index(row.finding))

    def blocks(self, row: Row) -> bool:
        """Whether this row closes the gate."""
        return row.finding not in _INFORMATION or (row.finding is Finding.DRIFTED and self.max_drift is not None)

    def _changes(self, now: RunSummary) -> list[Change]:
        if not self.baseline:
            return []
        limit = DRIFT if self.max_drift is None else self.max_drift
        return compare(_joined(self.baseline, self.expectations), now, limit)

    def _failures(self, now: RunSummary, changes: Sequence[Change]) -> Iterator[Row]:
        newly = {(change.backend, change.key) for change in changes if change.kind is Kind.NEWLY_FAILING}
        for record in now.records:
            if record.status is Status.UNEXPECTED_PASS:
                yield Row(Finding.UNEXPECTED_PASS, record.backend, record.case, record.expectation)
            elif record.failed:
                kind = Finding.NEWLY_FAILING if (record.backend, record.key) in newly else Finding.FAILING
                yield Row(kind, record.backend, record.case, " ".join(filter(None, (record.status, record.check))))

    def _outdated(self) -> Iterator[Row]:
        for entry, problem in self.expectations.problems():
            yield Row(Finding.EXPECTATION, entry.backend, entry.source, problem)


def _require_alike(reports: Sequence[RunSummary]) -> None:
    """Verdicts of different suites, tiers or deployed models say nothing about each other."""
    first = reports[0]
    for report in reports:
        if report.deployment != first.deployment:
            models = [str(r.deployment or "no one model") for r in (first, report)]
            raise InputError(f"{report.source}: expected a run of {models[0]} as in {first.source}, got {models[1]}")
        for name in ("suite", "tier"):
            expected, got = (r.environment.get(name) for r in (first, report))
            if got != expected:
                raise InputError(f"{report.source}: expected {name} {expected} as in {first.source}, got {got}")


def _joined(reports: Sequence[RunSummary], expectations: Expectations) -> RunSummary:
    """The run that all reports are of, as the expectations see its records."""
    joined: dict[str, dict[str, Record]] = {}
    known: dict[str, BackendFacts] = {}
    for report in reports:
        for backend in report.backends:
            found, here = joined.setdefault(backend.name, {}), facts(report.environment, backend.facts.versions)
            if backend.name not in known or not backend.reasons:
                known[backend.name] = backend.facts
            for record in backend.records:
                if record.key in found:
                    raise InputError(f"{report.source}: {backend.name} {record.key} stands in another report as well")
                found[record.key] = expectations.apply(record, here)
    cases = tuple(dict.fromkeys(case for report in reports for case in report.judged_cases))
    backends = (BackendSummary(known[name], summarise(found.values(), {})) for name, found in joined.items())
    return RunSummary(reports[0].environment, tuple(backends), cases)


def _incomplete(reports: Sequence[RunSummary]) -> Iterator[Row]:
    """Backends of whose list something was not run; and a run that judged nothing."""
    for name, keys in _not_run(reports).items():
        for capability, count in count_by_capability(keys).items():
            yield Row(Finding.INCOMPLETE, name, capability, f"{count} cases of the list have no verdict")
    if not any(report.records for report in reports):
        yield Row(Finding.INCOMPLETE, "*", "*", "nothing was judged")


def _not_run(reports: Sequence[RunSummary]) -> dict[str, list[str]]:
    """Keys without a record by backend; each report may be of one shard of the list."""
    run = [(report, backend) for report in reports for backend in report.backends if not backend.reasons]
    judged = {(backend.name, record.key) for _, backend in run for record in backend.records}
    wanted = dict.fromkeys((backend.name, key) for report, backend in run for key in report.keys_of(backend))
    missing: dict[str, list[str]] = {}
    for name, key in wanted:
        if (name, key) not in judged:
            missing.setdefault(name, []).append(key)
    return missing
