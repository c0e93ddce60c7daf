"""The gate: whether a run may be merged, judged by its report, a baseline, the expectations and a must-pass list."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.files.inputs import InputError
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import RunSummary, count_by_capability

DRIFT = 0.1
"""Share of the error budget by which a case may drift from the baseline before it is shown."""


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


_NOT_JUDGED = (Status.UNSUPPORTED, Status.UNAVAILABLE)
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
        max_drift: a larger drift blocks; None shows drift without blocking.
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
        found = [*_incomplete(self.reports), *self._failures(now), *self._outdated()]
        if self.baseline:
            found += self._changes(now, _joined(self.baseline, self.expectations))
        for backend, records in now.items() if self.must_pass else ():
            assert self.must_pass
            found += [Row(Finding.MUST_PASS, backend, *missing) for missing in self.must_pass.missing(records)]
        return sorted(found, key=lambda row: list(Finding).index(row.finding))

    def blocks(self, row: Row) -> bool:
        """Whether this row closes the gate."""
        return row.finding not in _INFORMATION or (row.finding is Finding.DRIFTED and self.max_drift is not None)

    def _failures(self, now: "Records") -> Iterator[Row]:
        before = _joined(self.baseline, self.expectations)
        for record in _flat(now):
            if record.status is Status.UNEXPECTED_PASS:
                yield Row(Finding.UNEXPECTED_PASS, record.backend, record.case, record.expectation)
            elif record.failed:
                earlier = before.get(record.backend, {}).get(record.key)
                known = not self.baseline or (earlier is not None and earlier.as_judged.failed)
                kind = Finding.FAILING if known else Finding.NEWLY_FAILING
                yield Row(kind, record.backend, record.case, " ".join(filter(None, (record.status, record.check))))

    def _outdated(self) -> Iterator[Row]:
        for entry, problem in self.expectations.problems():
            yield Row(Finding.EXPECTATION, entry.backend, entry.source, problem)

    def _changes(self, now: "Records", before: "Records") -> Iterator[Row]:
        for earlier in _flat(before):
            record = now.get(earlier.backend, {}).get(earlier.key)
            if record is None or (earlier.status is Status.PASS and record.status in _NOT_JUDGED):
                what = f"{earlier.status} in the baseline, {record.status if record else 'absent'} now"
                yield Row(Finding.LOST, earlier.backend, earlier.case, what)
            elif earlier.as_judged.failed and record.as_judged.status is Status.PASS:
                yield Row(Finding.NEWLY_PASSING, record.backend, record.case, f"was {earlier.as_judged.status}")
            elif earlier.status is record.status is Status.PASS:
                yield from self._drift(earlier, record)

    def _drift(self, earlier: Record, record: Record) -> Iterator[Row]:
        for rule, used in record.used.items():
            before = earlier.used.get(rule, 0.0)
            if used - before > (DRIFT if self.max_drift is None else self.max_drift):
                what = f"{rule}: {before:.2f} → {used:.2f} of the error budget"
                yield Row(Finding.DRIFTED, record.backend, record.case, what)


Records = Mapping[str, Mapping[str, Record]]
"""Records by backend and key."""


def _flat(records: Records) -> Iterator[Record]:
    return (record for by_case in records.values() for record in by_case.values())


def _require_alike(reports: Sequence[RunSummary]) -> None:
    """Verdicts of different suites or tiers say nothing about each other."""
    first = reports[0]
    for report in reports:
        for name in ("suite", "tier"):
            expected, got = (r.environment.get(name) for r in (first, report))
            if got != expected:
                raise InputError(f"{report.source}: expected {name} {expected} as in {first.source}, got {got}")


def _joined(reports: Sequence[RunSummary], expectations: Expectations) -> Records:
    """The records of all reports as the expectations see them."""
    joined: dict[str, dict[str, Record]] = {}
    for report in reports:
        for backend in report.backends:
            found, known = joined.setdefault(backend.name, {}), facts(report.environment, backend.versions)
            for record in backend.records:
                if record.key in found:
                    raise InputError(f"{report.source}: {backend.name} {record.key} stands in another report as well")
                found[record.key] = expectations.apply(record, known)
    return joined


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
