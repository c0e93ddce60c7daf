"""The gate: whether a run may be merged, judged by its report, a baseline, the expectations and a must-pass list."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.inputs import InputError
from mla_conformance.mustpass import MustPass
from mla_conformance.record import Record
from mla_conformance.report.read import BackendReport, Report
from mla_conformance.verdict import Status

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

    reports: Sequence[Report]
    expectations: Expectations
    baseline: Sequence[Report] = ()
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
                earlier = before.get(record.backend, {}).get(record.case)
                known = not self.baseline or (earlier is not None and earlier.as_judged.failed)
                kind = Finding.FAILING if known else Finding.NEWLY_FAILING
                yield Row(kind, record.backend, record.case, " ".join(filter(None, (record.status, record.check))))

    def _outdated(self) -> Iterator[Row]:
        for entry, problem in self.expectations.problems():
            yield Row(Finding.EXPECTATION, entry.backend, entry.source, problem)

    def _changes(self, now: "Records", before: "Records") -> Iterator[Row]:
        for earlier in _flat(before):
            record = now.get(earlier.backend, {}).get(earlier.case)
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
"""Records by backend and case id."""


def _flat(records: Records) -> Iterator[Record]:
    return (record for by_case in records.values() for record in by_case.values())


def _require_alike(reports: Sequence[Report]) -> None:
    """Verdicts of different suites or tiers say nothing about each other."""
    first = reports[0]
    for report in reports:
        for name in ("suite", "tier"):
            expected, got = ((r.suite if name == "suite" else r.environment.get(name)) for r in (first, report))
            if got != expected:
                raise InputError(f"{report.path}: expected {name} {expected} as in {first.path}, got {got}")


def _joined(reports: Sequence[Report], expectations: Expectations) -> Records:
    """The records of all reports as the expectations see them."""
    joined: dict[str, dict[str, Record]] = {}
    for report in reports:
        for backend in report.backends:
            for record in backend.records:
                _add(joined.setdefault(backend.name, {}), record, report)
                joined[backend.name][record.case] = expectations.apply(
                    record, facts(report.environment, backend.versions)
                )
    return joined


def _add(found: dict[str, Record], record: Record, report: Report) -> None:
    if record.case in found:
        raise InputError(f"{report.path}: {record.backend} {record.case} stands in another report as well")


def _incomplete(reports: Sequence[Report]) -> Iterator[Row]:
    """Backends of whose list something was not run; and a run that judged nothing."""
    parts: dict[str, list[BackendReport]] = {}
    for report in reports:
        for backend in report.backends:
            parts.setdefault(backend.name, []).append(backend)
    for name, shards in parts.items():
        for capability, missing in _not_run([shard for shard in shards if not shard.reasons]).items():
            yield Row(Finding.INCOMPLETE, name, capability, f"{missing} cases of the list have no verdict")
    if not any(shard.records for shards in parts.values() for shard in shards):
        yield Row(Finding.INCOMPLETE, "*", "*", "nothing was judged")


def _not_run(shards: Sequence[BackendReport]) -> dict[str, int]:
    """Cases without a verdict by capability; each shard may list its own part or the whole."""
    missing = {}
    for capability in dict.fromkeys(name for shard in shards for name in shard.listed):
        listed = [shard.listed.get(capability, 0) for shard in shards]
        run = [sum(record.capability == capability for record in shard.records) for shard in shards]
        if sum(listed) > sum(run) and max(listed) > sum(run):
            missing[capability] = max(listed) - sum(run)
    return missing
