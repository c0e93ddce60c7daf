"""Reading ``report.json`` back: only what a run wrote is accepted, with counts that follow from its records."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mla_conformance.record import Record
from mla_conformance.report.json_report import FAILURE_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, report_json
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability, summarise
from mla_conformance.sharding import Shard
from mla_conformance.verdict import Status


class ReportError(ValueError):
    """A report that cannot be read, or does not fit what was asked of it; the message names the file."""


def load_report(path: Path) -> RunSummary:
    """The run that a report tells of.

    Raises:
        ReportError: unreadable, truncated, of another schema, malformed, or with counts that do not add up.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ReportError(f"{path}: not JSON, truncated perhaps: {error}") from error
    _require_schema(path, data)
    try:
        run = _run(data)
        rebuilt = json.loads(json.dumps(report_json(run)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ReportError(f"{path}: malformed report: {type(error).__name__}: {error}") from error
    for place, found, expected in differences(data, rebuilt):
        raise ReportError(f"{path}: {place} is {_brief(found)}, but {_brief(expected)} follows from the records")
    return run


def _require_schema(path: Path, data: Any) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    name, _, version = str(schema).partition("/")
    if name != SCHEMA_NAME or not version.isdecimal():
        raise ReportError(f"{path}: expected a report with schema {SCHEMA_NAME}/{SCHEMA_VERSION}, got {schema!r}")
    if int(version) != SCHEMA_VERSION:
        age = "newer" if int(version) > SCHEMA_VERSION else "older"
        raise ReportError(f"{path}: schema {schema} is {age} than {SCHEMA_NAME}/{SCHEMA_VERSION}, which is read here")


def _run(data: dict[str, Any]) -> RunSummary:
    shard = Shard(**{**data["shard"], "cases": tuple(data["shard"]["cases"])}) if data["shard"] else None
    cases = tuple(data["cases"])
    own = shard.cases if shard else cases
    if len(set(cases)) < len(cases) or not set(own) <= set(cases):
        raise ValueError("the list of cases holds a case twice, or lacks one of its shard")
    backends = tuple(_backend(name, part, own) for name, part in data["backends"].items())
    return RunSummary({"suite": data["suite"], **data["environment"]}, backends, cases, shard)


def _backend(name: str, part: dict[str, Any], cases: Sequence[str]) -> BackendSummary:
    records = list(_records(name, part))
    judged = {record.case for record in records}
    if len(judged) < len(records) or not judged <= set(cases):
        raise ValueError(f"{name} has two records of one case, or one of a case that is not listed")
    return BackendSummary(
        name=name,
        reasons=tuple(part["reasons"]),
        versions=part["versions"],
        emulated=part["emulated"],
        deviations=tuple((deviation["library"], deviation["adapter"]) for deviation in part["deviations"]),
        rounding=part["rounding"],
        capabilities=() if part["reasons"] else summarise(records, count_by_capability(cases)),
        reference=part["reference"],
    )


def _records(name: str, part: dict[str, Any]) -> Iterator[Record]:
    failures = {failure["case"]: failure for entry in part["capabilities"].values() for failure in entry["failures"]}
    for data in part["records"]:
        failure = {key: failures.get(data["case"], {}).get(key) for key in FAILURE_FIELDS}
        known = {key: value for key, value in {**failure, **data}.items() if value is not None}
        yield Record(
            **{
                **known,
                "backend": name,
                "reference": part["reference"],
                "capability": data["case"].partition(":")[0],
                "status": Status(data["status"]),
                "used": {rule: float(share) for rule, share in known.get("used", {}).items()},
                "evidence": part["evidence"][data["evidence"]] if "evidence" in data else {},
            }
        )


def differences(found: Any, expected: Any, place: str = "report") -> Iterator[tuple[str, Any, Any]]:
    """Every (place, found value, expected value) where two JSON values differ; None stands for a missing one."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in dict.fromkeys([*found, *expected]):
            yield from differences(found.get(key), expected.get(key), f"{place}.{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif found != expected:
        yield place, found, expected


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
