"""``report.json``: the outcome of a run as data for machines."""

import json
import os
from pathlib import Path
from typing import Any

from mla_conformance.record import Record
from mla_conformance.report.summary import BackendSummary, CapabilitySummary, RunSummary

SCHEMA = "mla-conformance-report/1"


def report_json(run: RunSummary) -> dict[str, Any]:
    """The report as plain data; the keys are part of the interface."""
    environment = dict(run.environment)
    return {
        "schema": SCHEMA,
        "suite": environment.pop("suite"),
        "environment": environment,
        "backends": {backend.name: _backend(backend) for backend in run.backends},
    }


def _backend(backend: BackendSummary) -> dict[str, Any]:
    return {
        "status": backend.outcome,
        "reasons": list(backend.reasons),
        "versions": backend.versions,
        "evidence": backend.evidence,
        "emulated": backend.emulated,
        "rounding": backend.rounding,
        "deviations": [{"library": library, "adapter": adapter} for library, adapter in backend.deviations],
        "capabilities": {c.name: _capability(c) for c in backend.capabilities},
        "records": [_record(record) for c in backend.capabilities for record in c.records],
    }


def _record(record: Record) -> dict[str, Any]:
    """One verdict without its evidence and prose: what gates and certificates compute with."""
    kept = ("case", "status", "check", "used", "judged", "expectation")
    return {name: value for name, value in record.to_json().items() if name in kept and value}


def _capability(capability: CapabilitySummary) -> dict[str, Any]:
    return {
        "status": capability.outcome,
        "listed": capability.listed,
        "passed": capability.passed,
        "failed": len(capability.failures),
        "unsupported": capability.unsupported,
        "waived": capability.waived,
        "unavailable": [{"case": record.case, "message": record.message} for record in capability.unavailable],
        "not_run": capability.not_run,
        "error_budget_used": capability.error_budget_used,
        "failures": [_failure(record) for record in capability.failures],
    }


def _failure(record: Record) -> dict[str, Any]:
    kept = ("reference", "case", "status", "check", "clause", "message", "where", "used", "detail")
    data = record.to_json()
    return {**{name: data[name] for name in kept}, "replay": record.replay}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write whole or not at all: a full disk leaves an earlier report as it was.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
