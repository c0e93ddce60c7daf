"""Issuing a certificate: only for a complete, unfiltered run of the full tier by one real kernel."""

import datetime
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.certificate.digests import installed_digests, seal
from mla_conformance.gating.mustpass import MustPass, shipped
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import BackendSummary, RunSummary
from mla_conformance.running.certify import Run
from mla_conformance.version import SUITE_VERSION, __version__

SCHEMA = "mla-conformance-certificate/2"
COUNTED = {
    "passed": Status.PASS,
    "unsupported": Status.UNSUPPORTED,
    "unavailable": Status.UNAVAILABLE,
    "waived": Status.EXPECTED_FAILURE,
}
"""The counts of a certificate and the status that each counts; any other status counts as failed."""


class Refused(Exception):
    """No certificate, and why."""


def require_certifiable(run: Run) -> None:
    """Check a run before anything of it is launched.

    Raises:
        Refused: it could not be certified whatever it found.
    """
    for reason in _obstacles(run):
        raise Refused(reason)


def _obstacles(run: Run) -> Iterator[str]:
    selection = run.selection
    if len(selection.subjects) != 1:
        yield f"a certificate is of one backend: expected one --backend, got {len(selection.subjects)}"
    if selection.tier is not Tier.FULL:
        yield f"tier {selection.tier} leaves cases out; expected the full tier"
    if selection.cases or selection.capabilities != tuple(CAPABILITIES):
        yield "a selection of capabilities or cases leaves the others out"
    if run.shard or selection.explore:
        yield "a shard leaves cases out, and drawn cases stand in no list; certify without --shard and --explore"
    filters = [argument for argument in run.extra if not argument.startswith("--junitxml")]
    if filters:
        yield f"arguments for pytest may leave cases out: {' '.join(filters)}"
    (subject,) = selection.subjects
    if subject.unavailable:
        yield f"{subject.name} is unavailable: {'; '.join(subject.unavailable)}"
    if not subject.unavailable and subject.declaration.emulated:
        yield f"{subject.name} is an emulated kernel, which is judged but never certified"


def issue(run: RunSummary, today: datetime.date) -> dict[str, Any]:
    """The certificate of a run.

    Raises:
        Refused: the run is incomplete, something failed without an expectation, or a must-pass case did not pass.
    """
    (backend,) = run.backends
    _require_success(backend)
    records = [record for capability in backend.capabilities for record in capability.records]
    content = {
        "schema": SCHEMA,
        "suite": SUITE_VERSION,
        "version": __version__,
        "tier": Tier.FULL.value,
        "date": today.isoformat(),
        "backend": backend.name,
        "device": run.environment["device"],
        "environment": run.environment,
        "versions": backend.versions,
        "rounding": backend.rounding,
        "evidence": backend.evidence,
        "clean_tree": clean_tree(),
        "digests": installed_digests(),
        "counts": count(len(records), Counter(record.status for record in records)),
        "findings": [_finding(record) for record in records if record.status is Status.EXPECTED_FAILURE],
        "cases": {record.case: record.status.value for record in records},
    }
    return {**content, "seal": seal(content)}


def count(listed: int, statuses: "Counter[Status]") -> dict[str, int]:
    """The counts of a certificate."""
    counts = {name: statuses[status] for name, status in COUNTED.items()}
    run = sum(statuses.values())
    return {"listed": listed, "run": run, "failed": run - sum(counts.values()), **counts}


def _require_success(backend: BackendSummary) -> None:
    for capability in backend.capabilities:
        if capability.not_run:
            raise Refused(f"incomplete: {capability.not_run} cases of {capability.name} were not run")
        if capability.failures:
            first = capability.failures[0]
            raise Refused(f"{len(capability.failures)} failures of {capability.name}, first: {first.case}")
    by_case = {record.case: record for capability in backend.capabilities for record in capability.records}
    for case, why in MustPass.read(shipped()).missing(by_case, waivable=True):
        raise Refused(f"must-pass case {case} did not pass: {why}")


def _finding(record: Record) -> dict[str, str]:
    return {
        "case": record.case,
        "status": record.judged,
        "check": record.check,
        "message": record.message,
        "expectation": record.expectation,
    }


def clean_tree() -> bool | None:
    """Whether the checkout that runs here is unchanged; None if it is no checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "status", "--porcelain"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return not finished.stdout.strip()
