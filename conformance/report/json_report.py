"""``report.json``: the outcome of a run as data for machines, in the form of :mod:`~mla_conformance.report.form`."""

import json
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.files.outputs import write_whole
from mla_conformance.judging.record import EXPLORED, Record, Said, written
from mla_conformance.report.causes import Cause
from mla_conformance.report.form import (
    BackendForm,
    CapabilityForm,
    CauseForm,
    DeviationForm,
    FailureForm,
    PairsForm,
    RecordForm,
    ReportForm,
    SampledForm,
)
from mla_conformance.report.summary import BackendSummary, CapabilitySummary, RunSummary


def report_json(run: RunSummary) -> dict[str, Any]:
    """The report as plain data; the keys are part of the interface."""
    plain: dict[str, Any] = msgspec.to_builtins(report_form(run))
    return plain


def report_form(run: RunSummary) -> ReportForm:
    """The report of a run."""
    return ReportForm(
        suite=run.environment["suite"],
        environment={name: value for name, value in run.environment.items() if name != "suite"},
        cases=run.cases,
        shard=run.shard,
        date=run.date,
        deployment=run.deployment,
        code=dict(run.code),
        backends={backend.name: _backend(backend) for backend in run.backends},
    )


def _backend(backend: BackendSummary) -> BackendForm:
    facts, evidence = backend.facts, backend.evidence
    places = {frozenset(each.items()): place for place, each in enumerate(evidence)}
    return BackendForm(
        status=backend.outcome,
        reference=facts.reference,
        reasons=facts.reasons,
        stopped=backend.stopped,
        versions=facts.versions,
        evidence=tuple(evidence),
        traced=backend.traced,
        emulated=facts.emulated,
        rounding=facts.rounding,
        deviations=tuple(DeviationForm(library=library, adapter=adapter) for library, adapter in facts.deviations),
        fingerprint=facts.fingerprint,
        fitted=facts.fitted,
        region=facts.region,
        pairs={
            role: PairsForm(claimed=p.claimed, judged=p.judged, not_judged=p.not_judged)
            for role, p in backend.pairs.items()
        },
        causes=tuple(map(_cause, backend.causes)),
        heat=dict(backend.heat),
        traits=backend.traits,
        capabilities={capability.name: _capability(capability) for capability in backend.capabilities},
        records=tuple(_record(record, places.get(frozenset(record.evidence.items()))) for record in backend.records),
    )


def _cause(cause: Cause) -> CauseForm:
    return CauseForm(
        sentence=cause.sentence,
        kind=cause.kind,
        capabilities=cause.capabilities,
        clauses=cause.clauses,
        cases=tuple(record.case for record in cause.failures),
        example=cause.example.case,
        replay=cause.example.replay,
        used=cause.used,
    )


def _capability(capability: CapabilitySummary) -> CapabilityForm:
    return CapabilityForm(
        **msgspec.structs.asdict(capability.counts),
        status=capability.outcome,
        error_budget_used=written(capability.error_budget_used),
        failures=tuple(
            FailureForm(case=record.case, status=record.status, replay=record.replay, **said_of(record))
            for record in capability.failures
        ),
    )


def _record(record: Record, evidence: int | None) -> RecordForm:
    said = {} if record.failed else said_of(record)
    return RecordForm(
        case=record.case,
        status=record.status,
        seconds=record.seconds,
        evidence=evidence,
        capability=EXPLORED if record.key != record.case else "",
        cases=record.cases,
        sampled=SampledForm(**record.sampled) if record.sampled else None,
        **said,
    )


def said_of(record: Said) -> dict[str, Any]:
    """What is said of a case, by the names of its fields, from any form of a record."""
    return {name: getattr(record, name) for name in Said.__struct_fields__}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all."""
    write_whole(path, to_text(data))


def to_text(data: dict[str, Any] | ReportForm) -> str:
    """The text of a JSON file; what no UTF-8 can hold, such as half of a surrogate pair, becomes a question mark."""
    text = json.dumps(msgspec.to_builtins(data), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", errors="replace").decode("utf-8")
