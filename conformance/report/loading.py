"""Reading ``report.json`` back: only what a run wrote is accepted, with counts that follow from its records."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mla_conformance.cases.case import Case
from mla_conformance.cases.sharding import Shard
from mla_conformance.files.inputs import InputError, read_json_object
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import FAILURE_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, report_json
from mla_conformance.report.summary import BackendSummary, RunSummary, count_by_capability, summarise

_T = TypeVar("_T")
_TEXTS = ("check", "clause", "message", "explanation", "detail", "judged", "expectation")


def load_report(path: Path) -> RunSummary:
    """The run that a report file, or the one in a run's folder, tells of.

    Raises:
        InputError: unreadable, truncated, of another schema, malformed, or with counts that do not add up.
    """
    path = path / "report.json" if path.is_dir() else path
    data = read_json_object(path)
    _require_schema(path, data.get("schema"))
    try:
        run = _run(data, str(path))
        rebuilt = json.loads(json.dumps(report_json(run)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: malformed report: {type(error).__name__}: {error}") from error
    for place, found, expected in differences(data, rebuilt):
        raise InputError(f"{path}: {place} is {_brief(found)}, but {_brief(expected)} follows from the records")
    return run


def _require_schema(path: Path, schema: Any) -> None:
    name, _, version = str(schema).partition("/")
    if name != SCHEMA_NAME or not (version.isascii() and version.isdecimal()):
        raise InputError(f"{path}: expected a report with schema {SCHEMA_NAME}/{SCHEMA_VERSION}, got {schema!r}")
    if int(version) != SCHEMA_VERSION:
        age = "newer" if int(version) > SCHEMA_VERSION else "older"
        raise InputError(f"{path}: schema {schema} is {age} than {SCHEMA_NAME}/{SCHEMA_VERSION}, which is read here")


def _run(data: dict[str, Any], source: str) -> RunSummary:
    shard = _shard(data["shard"])
    cases = tuple(data["cases"])
    own = shard.cases if shard else cases
    if len(set(cases)) < len(cases) or not set(own) <= set(cases):
        raise ValueError("the list of cases holds a case twice, or lacks one of its shard")
    for case in cases:
        Case.parse(case)
    backends = tuple(_backend(name, part, own) for name, part in data["backends"].items())
    environment = _texts({"suite": data["suite"], **data["environment"]})
    return RunSummary(environment, backends, cases, shard, source)


def _shard(data: Any) -> Shard | None:
    if data is None:
        return None
    shard = Shard(_typed(data["index"], int), _typed(data["count"], int), tuple(data["cases"]))
    if not 1 <= shard.index <= shard.count:
        raise ValueError(f"there is no shard {shard}")
    return shard


def _typed(value: Any, kind: type[_T]) -> _T:
    """The value, if it is of this type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected a value of type {kind.__name__}, got {value!r}")
    return value


def _texts(data: dict[str, Any]) -> dict[str, str]:
    """An object whose values are all text."""
    return {name: _typed(value, str) for name, value in data.items()}


def _backend(name: str, part: dict[str, Any], cases: Sequence[str]) -> BackendSummary:
    records = list(_records(name, part))
    judged = {record.key for record in records}
    if len(judged) < len(records) or not judged <= {*cases, EXPLORED}:
        raise ValueError(f"{name} has two records of one case, or one of a case that is not listed")
    listed = count_by_capability(cases) | ({EXPLORED: 1} if EXPLORED in part["capabilities"] else {})
    return BackendSummary(
        name=name,
        reasons=tuple(_typed(reason, str) for reason in _typed(part["reasons"], list)),
        versions=_texts(part["versions"]),
        emulated=_typed(part["emulated"], bool),
        deviations=tuple((d["library"], d["adapter"]) for d in map(_texts, part["deviations"])),
        rounding=_texts(part["rounding"]),
        capabilities=() if part["reasons"] else summarise(records, listed),
        reference=_typed(part["reference"], str),
    )


def _records(name: str, part: dict[str, Any]) -> Iterator[Record]:
    failures = {
        (capability, failure["case"]): failure
        for capability, entry in part["capabilities"].items()
        for failure in entry["failures"]
    }
    for data in part["records"]:
        capability = data.get("capability", data["case"].partition(":")[0])
        failure = failures.get((capability, data["case"]), {})
        known = {key: failure[key] for key in FAILURE_FIELDS if key in failure} | data
        yield _record(known | {"backend": name, "reference": part["reference"], "capability": capability}, part)


def _record(known: dict[str, Any], part: dict[str, Any]) -> Record:
    _texts({name: known[name] for name in _TEXTS if name in known})
    if known.get("judged"):
        Status(known["judged"])
    found = {
        "seconds": float(known["seconds"]),
        "cases": _typed(known.get("cases", 1), int),
        "used": {rule: float(share) for rule, share in known.get("used", {}).items()},
        "where": {name: _typed(value, int) for name, value in known.get("where", {}).items()},
        "evidence": _texts(part["evidence"][_typed(known["evidence"], int)]) if "evidence" in known else {},
    }
    return Record.from_json({**known, **found})


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
