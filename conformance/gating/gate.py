"""The gate: whether a run may be merged, judged by its report, a baseline, the expectations and a must-pass list."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby, product

from mla_conformance.backends.foreign import cut
from mla_conformance.backends.references import nearest
from mla_conformance.expectations import Expectations
from mla_conformance.files.whole import InputError
from mla_conformance.gating.mustpass import MustPass, Required
from mla_conformance.judging.record import EXPLORED, BackendFacts, Record, Status
from mla_conformance.judging.traits import Answer, Question
from mla_conformance.report import causes, json_report
from mla_conformance.report.differences import DRIFT, Change, ChangeKind, compare, differing
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.report.terminal import counted, fitting
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier


class GateFinding(StrEnum):  # in the order in which they are shown
    MISSING = "missing"
    INCOMPLETE = "not run"
    FAILING = "failing"
    NEWLY_FAILING = "newly failing"
    UNAVAILABLE = "unavailable"
    LOST = "no longer judged"
    UNEXPECTED_PASS = "unexpected pass"
    MUST_PASS = "must pass"
    BITWISE = "other bits"
    EXPECTATION = "expectation"
    TOO_LARGE = "too large here"
    NEWLY_PASSING = "newly passing"
    DRIFTED = "drifted"


@dataclass(frozen=True)
class GateRow:
    finding: GateFinding  # its kind
    backend: str  # whom it is about, or ``*``
    what: str  # a case, or what else it is about
    detail: str  # what is to be said of that
    cases: int = 1  # how many it adds to those of its kind


_GONE = (ChangeKind.BACKEND_REMOVED, ChangeKind.NO_LONGER_AVAILABLE, ChangeKind.CASE_REMOVED, ChangeKind.LOST)
_CHANGES = dict.fromkeys(_GONE, GateFinding.LOST)
_CHANGES |= {ChangeKind.NEWLY_PASSING: GateFinding.NEWLY_PASSING, ChangeKind.GREW: GateFinding.DRIFTED}
"""What the gate shows of the changes since the baseline; what fails newly it shows among the failures."""
_INFORMATION = (GateFinding.TOO_LARGE, GateFinding.NEWLY_PASSING, GateFinding.DRIFTED)
_SHOWN, _NAME = 20, 100  # findings of a kind that have a line each, and bytes of a name
_NAMED = 400  # characters in which further ones are named


@dataclass(frozen=True)
class Gate:
    reports: Sequence[RunSummary]  # the run; several reports are shards or backends of one run
    expectations: Expectations  # known failures
    absent: Sequence[str] = ()  # reports that were named, but are not there
    required: Sequence[Required] = ()  # the backends that have to be judged
    tier: Tier | None = None  # of whose cases each backend needs a verdict; None takes whatever was selected
    baseline: Sequence[RunSummary] = ()  # the reports of an earlier run to compare with
    must_pass: MustPass | None = None  # what has to be passed
    max_drift: float | None = None  # growth of an error, as a share of its budget, that blocks; None only shows it
    suites: Sequence[str] = ()  # versions of the suite, beside the one that is installed, whose verdicts are taken
    bitwise: Sequence[Question] = ()  # what each backend has to answer with yes, in every role that it applies to

    def rows(self) -> list[GateRow]:
        alike = [*self.reports, *self.baseline]  # or verdicts say nothing about each other
        for report in alike[1:]:
            for name, expected, got in differing(_traits(alike[0]), _traits(report)):
                raise InputError(f"{report.source}: expected {name} {expected} as in {alike[0].source}, got {got}")
        for runs in (self.reports, self.baseline):
            json_report.require_one_code(runs)
        self._require_installed()
        now, changes = self.now, list[Change]()
        if self.baseline:
            limit = DRIFT if self.max_drift is None else self.max_drift
            changes = compare(_joined(self.baseline, self.expectations), now, limit)
        newly = {(change.backend, change.key) for change in changes if change.kind is ChangeKind.NEWLY_FAILING}
        found = [*self._missing(), *self._incomplete()]
        for each in now.records:
            if each.status is Status.UNEXPECTED_PASS:
                found.append(GateRow(GateFinding.UNEXPECTED_PASS, each.backend, each.case, each.expectation))
            elif each.failed:
                kind = GateFinding.NEWLY_FAILING if (each.backend, each.key) in newly else GateFinding.FAILING
                found.append(GateRow(kind, each.backend, each.case, " ".join(filter(None, (each.status, each.check)))))
            elif each.status is Status.UNAVAILABLE:
                kind = GateFinding.TOO_LARGE if each.too_large else GateFinding.UNAVAILABLE
                found.append(GateRow(kind, each.backend, each.case, each.message))
        found += [GateRow(GateFinding.EXPECTATION, e.backend, e.source, why) for e, why in self.expectations.problems()]
        found += [GateRow(_CHANGES[c.kind], c.backend, c.key or "*", c.detail) for c in changes if c.kind in _CHANGES]
        for backend in now.backends if self.must_pass else ():
            assert self.must_pass
            missing = self.must_pass.missing({record.key: record for record in backend.records})
            found += [GateRow(GateFinding.MUST_PASS, backend.name, *each) for each in missing]
        found += self._bits()
        return sorted(found, key=lambda row: list(GateFinding).index(row.finding))

    @cached_property
    def now(self) -> RunSummary:
        return _joined(self.reports, self.expectations)

    def blocks(self, row: GateRow) -> bool:
        return row.finding not in _INFORMATION or (row.finding is GateFinding.DRIFTED and self.max_drift is not None)

    def _require_installed(self) -> None:
        wanted = {f"the {self.tier} tier": SUITE_VERSION} if self.tier else {}
        wanted |= {f"--must-pass {self.must_pass.name}": self.must_pass.suite} if self.must_pass else {}
        for report in self.reports:
            found = report.environment["suite"]
            for what, suite in wanted.items():
                if suite not in ("", found):
                    said = f"{what} is of suite {suite} here, but the report is of suite {found}"
                    raise InputError(f"{report.source}: {said}")
            if found not in (SUITE_VERSION, *self.suites):
                said = f"expected a report of suite {SUITE_VERSION}, which is installed here, got one of suite {found}"
                what = f"judge again, or accept its verdicts with --allow-suite {found}"
                raise InputError(f"{report.source}: {said}; {what}")

    def _missing(self) -> Iterator[GateRow]:
        for name in self.absent:
            yield GateRow(GateFinding.MISSING, "*", name, "no such report: did its job end before it wrote one?")
        for required in self.required:
            if reason := required.missing([backend for _, backend in self._parts.get(required.name, [])]):
                meant = "" if required.name in self._parts else nearest(required.name, self._parts)
                hint = f"; did you mean {meant}?" if meant else ""
                yield GateRow(GateFinding.MISSING, required.name, "*", reason + hint)
        for name, parts in self._parts.items():
            shards = causes.grouped((report.shard for report, _ in parts if report.shard), lambda shard: shard.count)
            for count, present in shards.items():
                for index in sorted({*range(1, count + 1)} - {shard.index for shard in present}):
                    yield GateRow(GateFinding.MISSING, name, f"shard {index}/{count}", "in no report")

    def _incomplete(self) -> Iterator[GateRow]:
        cases = [case.id for entry in CAPABILITIES.values() for case in entry.select(self.tier)] if self.tier else []
        for name, parts in self._parts.items():
            run = [(report, backend) for report, backend in parts if not backend.reasons]
            listed = dict.fromkeys(key for report, backend in run for key in report.keys_of(backend))
            judged = {record.key for _, backend in run for record in backend.records}
            wanted = [*dict.fromkeys([*cases, *listed])] if run else []
            left = [key for key in wanted if key not in judged]
            tier = run[0][0].environment.get("tier") if left else None  # the same in all reports
            if self.tier and tier in list(Tier)[: list(Tier).index(self.tier)]:
                said = f"the report is of tier {tier}; expected tier {self.tier}, or pass --require-tier {tier}"
                yield GateRow(GateFinding.INCOMPLETE, name, _extent(wanted, left), said, len(left))
                continue
            if left:
                of_what = f"of the {self.tier} tier" if self.tier else "of its list"
                yield GateRow(GateFinding.INCOMPLETE, name, _extent(wanted, left), of_what, cases=0)
            for capability, count in Counter(key.partition(":")[0] for key in left).items():
                said = f"{counted(count, 'case')} of the list without a verdict"
                yield GateRow(GateFinding.INCOMPLETE, name, capability, said, count)
        if not any(report.records for report in self.reports):
            yield GateRow(GateFinding.INCOMPLETE, "*", "*", "nothing was judged")

    @cached_property
    def _parts(self) -> dict[str, list[tuple[RunSummary, BackendSummary]]]:
        pairs = ((report, backend) for report in self.reports for backend in report.backends)
        return causes.grouped(pairs, lambda pair: pair[1].name)

    def _bits(self) -> Iterator[GateRow]:
        for question, (name, parts) in product(self.bitwise, self._parts.items()):
            answers = [found for _, backend in parts for found in backend.traits.answers(question).values()]
            if not answers and not all(backend.reasons for _, backend in parts):
                yield GateRow(GateFinding.BITWISE, name, question, "not measured; certify with --bitwise")
            for found in answers:
                if found.answer is Answer.NO:
                    yield GateRow(GateFinding.BITWISE, name, question, f"{found.role}: {found.why}")


def _extent(wanted: Sequence[str], left: Sequence[str]) -> str:
    wanted, left = ([key for key in keys if key != EXPLORED] for keys in (wanted, left))
    capabilities, lacking = ({key.partition(":")[0] for key in keys} for keys in (wanted, left))
    return f"{len(left)} of {len(wanted)} cases, {len(lacking)} of {len(capabilities)} capabilities"


def _traits(report: RunSummary) -> dict[str, str | None]:
    environment = {name: report.environment.get(name) for name in ("suite", "tier")}
    return {"a run of": str(report.deployment or "no one model"), **environment}


def _joined(reports: Sequence[RunSummary], expectations: Expectations) -> RunSummary:
    joined: dict[str, dict[str, Record]] = {}
    known: dict[str, BackendFacts] = {}
    for report in reports:
        for backend in report.backends:
            found, here = joined.setdefault(backend.name, {}), {**backend.facts.versions, **report.environment}
            if backend.name not in known or not backend.reasons:
                known[backend.name] = backend.facts
            for record in backend.records:
                if record.key in found:
                    said = "an earlier run, set aside in a folder of the same name with a date, is no part of this one"
                    twice = f"{backend.name} {record.key} is in another report as well"
                    raise InputError(f"{report.source}: {twice}; {said}")
                found[record.key] = expectations.apply(record, here)
    cases = tuple(dict.fromkeys(case for report in reports for case in report.judged_cases))
    backends = (BackendSummary(known[name], summarise(found.values())) for name, found in joined.items())
    return RunSummary(reports[0].environment if reports else {}, tuple(backends), cases)


def gate_lines(gate: Gate, rows: Sequence[GateRow], blocked: bool) -> Iterator[str]:
    width, found = max((len(cut(row.backend, _NAME)) for row in rows), default=0), list[str]()
    for finding, group in groupby(rows, key=lambda row: row.finding):
        of_kind = list(group)
        for row in of_kind[:_SHOWN]:
            yield f"{finding:<16} {cut(row.backend, _NAME):<{width}} {cut(row.what)} · {cut(row.detail)}"
        if hidden := of_kind[_SHOWN:]:
            yield fitting(f"{finding:<16} … ", [cut(row.what, _NAME) for row in hidden], _NAMED)
        found.append(f"{sum(row.cases for row in of_kind)} {finding}")
    for backend in gate.now.backends:
        if backend.causes:
            first, *others = backend.causes
            further = f"; {counted(len(others), 'other cause')}" if others else ""
            cause = f"{cut(first.headline)} · {counted(len(first.failures), 'case')}{further}"
            yield f"{'cause':<16} {cut(backend.name, _NAME):<{width}} {cause}"
    verdicts, waived = sum(len(report.records) for report in gate.reports), gate.now.counts.waived
    counts = [counted(verdicts, "verdict"), *([counted(waived, "expected failure")] if waived else []), *found]
    terms = [*dict.fromkeys(f"suite {report.environment['suite']}" for report in gate.reports)]
    terms += [f"{gate.tier} tier required" if gate.tier else "any selection accepted"]
    terms += [f"must-pass {gate.must_pass.name}"] if gate.must_pass else []
    yield f"gate {'CLOSED' if blocked else 'open'} · " + " · ".join([*terms, *counts])
