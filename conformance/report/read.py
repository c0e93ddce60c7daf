"""``report.json`` read back: what gates and certificates compute with, checked against its own counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.case import Case, CaseError
from mla_conformance.inputs import InputError, member, read_json_object
from mla_conformance.journal import Journal
from mla_conformance.record import Record
from mla_conformance.report.json_report import SCHEMA
from mla_conformance.verdict import Status

_KEPT = ("case", "status", "check", "used", "judged", "expectation")


@dataclass(frozen=True)
class BackendReport:
    """A backend's part of a report.

    Attributes:
        name: the backend.
        reasons: why it is unavailable; empty if it was run.
        versions: versions of its distributions.
        listed: cases of each capability in the run's list.
        records: what was judged.
    """

    name: str
    reasons: tuple[str, ...]
    versions: dict[str, str]
    listed: dict[str, int]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        path: where it stands, for messages.
        suite: version of the suite.
        environment: device and versions.
        backends: one entry per backend of the run.
    """

    path: Path
    suite: str
    environment: dict[str, str]
    backends: tuple[BackendReport, ...]


def read_report(path: Path) -> Report:
    """A report file, or the one in a run's folder.

    Raises:
        InputError: it cannot be read, is of another schema, or its verdicts and counts disagree.
    """
    path = path / "report.json" if path.is_dir() else path
    data = read_json_object(path)
    if data.get("schema") != SCHEMA:
        raise InputError(f"{path}: expected a report of schema {SCHEMA}, got {data.get('schema')!r}")
    environment = _texts(member(data, "environment", dict, str(path)))
    parts = member(data, "backends", dict, str(path))
    backends = tuple(_backend(name, part, path) for name, part in parts.items())
    return Report(path, member(data, "suite", str, str(path)), environment, backends)


def _backend(name: str, part: Any, path: Path) -> BackendReport:
    where = f"{path}: backend {name}"
    capabilities = member(part, "capabilities", dict, where)
    listed = {key: member(value, "listed", int, f"{where} {key}") for key, value in capabilities.items()}
    records = _records(name, part, path)
    _require_counts(capabilities, records, where)
    reasons = tuple(map(str, member(part, "reasons", list, where)))
    return BackendReport(name, reasons, _texts(member(part, "versions", dict, where)), listed, records)


def _texts(data: dict[str, Any]) -> dict[str, str]:
    """The entries that conditions can compare with."""
    return {name: value for name, value in data.items() if isinstance(value, str)}


def _records(name: str, part: dict[str, Any], path: Path) -> tuple[Record, ...]:
    """The verdicts in the report, or those of the journal beside one that lists none."""
    if "records" in part:
        return tuple(_record(name, entry, path) for entry in member(part, "records", list, f"{path}: backend {name}"))
    events = Journal.inside(path.parent).events()
    verdicts = [event["record"] for event in events if event.get("event") == "verdict"]
    return tuple(_record(name, entry, path) for entry in verdicts if entry.get("backend") == name)


def _record(backend: str, entry: Any, path: Path) -> Record:
    try:
        kept = {key: entry[key] for key in _KEPT if key in entry}
        capability = Case.parse(kept["case"]).capability
        if kept.get("judged"):
            Status(kept["judged"])
        kept["used"] = {rule: float(share) for rule, share in kept.get("used", {}).items()}
        texts: dict[str, Any] = {key: str(kept[key]) for key in ("check", "judged", "expectation") if key in kept}
        return Record.from_json({"backend": backend, "reference": backend, "capability": capability, **kept, **texts})
    except (KeyError, TypeError, AttributeError, ValueError, CaseError) as error:
        raise InputError(f"{path}: backend {backend}: malformed record {entry!r}: {error}") from error


def _require_counts(capabilities: dict[str, Any], records: Sequence[Record], where: str) -> None:
    """A report that was edited, or put together wrongly, rarely still adds up."""
    seen = [record.case for record in records]
    twice = next((case for case in seen if seen.count(case) > 1), None)
    if twice:
        raise InputError(f"{where}: case {twice} stands in it twice")
    for name, counts in capabilities.items():
        own = [record for record in records if record.capability == name]
        passed = sum(record.status is Status.PASS for record in own)
        said = tuple(member(counts, key, int, f"{where} {name}") for key in ("listed", "passed", "not_run"))
        if said != (len(own) + said[2], passed, said[2]):
            raise InputError(
                f"{where} {name}: counts and verdicts disagree: listed {said[0]}, passed {said[1]}, not run {said[2]}, "
                f"but {len(own)} verdicts, {passed} of them passes"
            )
