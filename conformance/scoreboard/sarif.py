"""Failures as SARIF 2.1.0, which viewers of static analyses read: one result for each case that a kernel fails."""

import hashlib
from collections.abc import Iterable
from typing import Any

from mla_conformance.certificate.certificate import Finding
from mla_conformance.judging.record import replay_line
from mla_conformance.judging.verdict import CLAUSES, Check
from mla_conformance.report.causes import WRONG
from mla_conformance.scoreboard.entry import Entry, Failure
from mla_conformance.version import __version__

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_OTHER = "failure"
"""The rule of a failure that names no check, such as a crash."""


def sarif(entries: Iterable[Entry]) -> dict[str, Any]:
    """A log with one run, as plain data; what an old record tells is a note, and says so."""
    results = [
        _result(entry, failure, finding)
        for entry in entries
        for failure in entry.failures
        for finding in failure.findings
    ]
    driver = {"name": "mla-conformance", "version": __version__, "rules": [*map(_rule, Check), _other()]}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _rule(check: Check) -> dict[str, Any]:
    said = f"{WRONG.get(check, check.replace('_', ' '))} (SPEC {CLAUSES[check]})"
    return {"id": str(check), "shortDescription": {"text": said}}


def _other() -> dict[str, Any]:
    return {"id": _OTHER, "shortDescription": {"text": "the call did not end in a result"}}


def _result(entry: Entry, failure: Failure, finding: Finding) -> dict[str, Any]:
    record = entry.record
    replay = replay_line(finding.case, record.reference, salt=record.environment.get("salt", ""))
    where = f"{record.backend}, {entry.versions}, {record.device}, {entry.state}"
    return {
        "ruleId": finding.check if finding.check in set(Check) else _OTHER,
        "level": "note" if entry.old else "error",
        "message": {"text": f"{where}: {failure.reason}. {finding.message}. Replay: {replay}"},
        "locations": [{"logicalLocations": [_location(record.backend, finding.case)]}],
        "partialFingerprints": {
            "kernelAndCase/v1": _digest(record.backend, entry.versions, record.device, finding.case)
        },
    }


def _location(kernel: str, case: str) -> dict[str, str]:
    return {"name": case, "fullyQualifiedName": f"{kernel}/{case}", "kind": "member"}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", errors="replace")).hexdigest()
