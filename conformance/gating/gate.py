"""The gate: whether a run may be merged, judged by its report, a baseline, the expectations and a must-pass list."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.files.inputs import InputError
from mla_conformance.gating.completeness import incomplete, missing
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.gating.row import Finding, Row
from mla_conformance.judging.facts import BackendFacts
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.compare import DRIFT, Change, Kind, compare
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import Tier

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
class Gate:
    """Everything that a gate decides by.

    Attributes:
        reports: the run; several reports are shards or backends of one run.
        expectations: known failures.
        absent: reports that were named, but are not there.
        required: names of the backends that have to be judged.
        tier: the tier of whose cases each backend needs a verdict; None takes whatever was selected.
        baseline: the reports of an earlier run to compare with.
        must_pass: what has to be passed.
        max_drift: growth of an error, as a share of its budget, that blocks; None shows what grew without blocking.
    """

    reports: Sequence[RunSummary]
    expectations: Expectations
    absent: Sequence[str] = ()
    required: Sequence[str] = ()
    tier: Tier | None = None
    baseline: Sequence[RunSummary] = ()
    must_pass: MustPass | None = None
    max_drift: float | None = None

    def rows(self) -> list[Row]:
        """Everything found, by kind.

        Raises:
            InputError: reports that do not belong together.
        """
        _require_alike([*self.reports, *self.baseline])
        self._require_installed()
        now, changes = self.now, self._changes()
        found = [*missing(self.reports, self.absent, self.required), *incomplete(self.reports, self.tier)]
        found += [*self._failures(now, changes), *self._outdated()]
        found += [Row(_CHANGES[c.kind], c.backend, c.key or "*", c.detail) for c in changes if c.kind in _CHANGES]
        for backend in now.backends if self.must_pass else ():
            assert self.must_pass
            records = {record.key: record for record in backend.records}
            found += [Row(Finding.MUST_PASS, backend.name, *missing) for missing in self.must_pass.missing(records)]
        return sorted(found, key=lambda row: list(Finding).index(row.finding))

    @cached_property
    def now(self) -> RunSummary:
        """The run that the reports are of, as the expectations see it.

        Raises:
            InputError: a case stands in two of them.
        """
        return _joined(self.reports, self.expectations)

    @property
    def terms(self) -> list[str]:
        """What is decided by, in words."""
        suites = {f"suite {report.environment['suite']}": "" for report in self.reports}
        tier = f"{self.tier} tier required" if self.tier else "any selection taken"
        return [*suites, tier, *([f"must-pass {self.must_pass.name}"] if self.must_pass else [])]

    def blocks(self, row: Row) -> bool:
        """Whether this row closes the gate."""
        return row.finding not in _INFORMATION or (row.finding is Finding.DRIFTED and self.max_drift is not None)

    def _require_installed(self) -> None:
        """The lists of tiers and of what must pass are those of the suite that is installed here."""
        wanted = {f"the {self.tier} tier": SUITE_VERSION} if self.tier else {}
        wanted |= {f"--must-pass {self.must_pass.name}": self.must_pass.suite} if self.must_pass else {}
        for report in self.reports:
            for what, suite in wanted.items():
                if suite not in ("", report.environment["suite"]):
                    raise InputError(
                        f"{report.source}: {what} is of suite {suite} here, but the report is of suite "
                        f"{report.environment['suite']}"
                    )

    def _changes(self) -> list[Change]:
        if not self.baseline:
            return []
        limit = DRIFT if self.max_drift is None else self.max_drift
        return compare(_joined(self.baseline, self.expectations), self.now, limit)

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
    for report in reports[1:]:
        models = [str(each.deployment or "no one model") for each in (reports[0], report)]
        if models[0] != models[1]:
            raise InputError(
                f"{report.source}: expected a run of {models[0]} as in {reports[0].source}, got {models[1]}"
            )
        for name in ("suite", "tier"):
            expected, got = (r.environment.get(name) for r in (reports[0], report))
            if got != expected:
                raise InputError(f"{report.source}: expected {name} {expected} as in {reports[0].source}, got {got}")


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
                    raise InputError(
                        f"{report.source}: {backend.name} {record.key} stands in another report as well; is one of "
                        "them of an earlier run, which was moved to a folder of the same name with a date?"
                    )
                found[record.key] = expectations.apply(record, here)
    cases = tuple(dict.fromkeys(case for report in reports for case in report.judged_cases))
    backends = (BackendSummary(known[name], summarise(found.values(), {})) for name, found in joined.items())
    return RunSummary(reports[0].environment if reports else {}, tuple(backends), cases)
