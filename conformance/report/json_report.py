"""``report.json``: the outcome of a run as data for machines; its JSON Schema is ``schema.json`` in this folder."""

import json
import math
from pathlib import Path
from typing import Any

from mla_conformance.files.outputs import write_whole
from mla_conformance.judging.record import Record
from mla_conformance.report.summary import BackendSummary, CapabilitySummary, RunSummary

SCHEMA_NAME = "mla-conformance-report"
SCHEMA_VERSION = 2
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
_SAID = ("check", "clause", "message", "where", "explanation", "detail", "judged", "expectation")
FAILURE_FIELDS = ("case", "status", *_SAID, "used")
"""What a report tells of a failure; its replay line follows from it."""


def report_json(run: RunSummary) -> dict[str, Any]:
    """The report as plain data; the keys are part of the interface."""
    environment = dict(run.environment)
    shard = run.shard
    return {
        "schema": SCHEMA,
        "suite": environment.pop("suite"),
        "environment": environment,
        "cases": list(run.cases),
        "shard": {"index": shard.index, "count": shard.count, "cases": list(shard.cases)} if shard else None,
        "backends": {backend.name: _backend(backend) for backend in run.backends},
    }


def _backend(backend: BackendSummary) -> dict[str, Any]:
    evidence = backend.evidence
    return {
        "status": backend.outcome,
        "reference": backend.reference,
        "reasons": list(backend.reasons),
        "versions": backend.versions,
        "evidence": evidence,
        "emulated": backend.emulated,
        "rounding": backend.rounding,
        "deviations": [{"library": library, "adapter": adapter} for library, adapter in backend.deviations],
        "capabilities": {c.name: _capability(c) for c in backend.capabilities},
        "records": [_record(record, evidence) for record in backend.records],
    }


def _capability(capability: CapabilitySummary) -> dict[str, Any]:
    return {
        "status": capability.outcome,
        "listed": capability.listed,
        "passed": capability.passed,
        "failed": len(capability.failures),
        "unsupported": capability.unsupported,
        "unavailable": capability.unavailable,
        "waived": capability.waived,
        "not_run": capability.not_run,
        "error_budget_used": number(capability.error_budget_used),
        "failures": [_failure(record) for record in capability.failures],
    }


def _failure(record: Record) -> dict[str, Any]:
    data = record.to_json()
    kept = {name: data[name] for name in FAILURE_FIELDS}
    return {**kept, "used": _used(record), "replay": record.replay}


def _record(record: Record, evidence: list[dict[str, str]]) -> dict[str, Any]:
    """What every record has, without what is empty; what is said of a failure stands with its capability."""
    data: dict[str, Any] = {"case": record.case, "status": record.status, "seconds": record.seconds}
    if record.key != record.case:
        data |= {"capability": record.capability, "cases": record.cases}
    if record.sampled:
        data["sampled"] = record.sampled
    if record.evidence:
        data["evidence"] = evidence.index(record.evidence)
    if not record.failed:
        told = record.to_json()
        data |= {"used": _used(record)} if any(record.used.values()) else {}
        data |= {name: told[name] for name in _SAID if told[name]}
    return data


def _used(record: Record) -> dict[str, float | str]:
    return {rule: number(share) for rule, share in record.used.items()}


def number(value: float) -> float | str:
    """JSON has no NaN and no infinity; both are written as text that ``float`` reads."""
    return value if math.isfinite(value) else str(value)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, to_text(data))


def to_text(data: dict[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
