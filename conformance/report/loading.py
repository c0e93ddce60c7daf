"""Reading report.json back: only what a run wrote is accepted; and shards of one list put together again."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.backends.roles import outside
from mla_conformance.cases.case import Case
from mla_conformance.cases.grammar import require_id
from mla_conformance.cases.sharding import Shard
from mla_conformance.diagnosis.heat_map import is_mapped
from mla_conformance.files.whole import InputError, decode, read_text
from mla_conformance.judging.record import EXPLORED, BackendFacts, Record, Traced
from mla_conformance.judging.traits import NO_TRAITS
from mla_conformance.judging.verdict import Status
from mla_conformance.report import summary
from mla_conformance.report.differences import differences, differing
from mla_conformance.report.json_report import (
    ENVIRONMENT,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    BackendForm,
    ReportForm,
    report_form,
    said_of,
)
from mla_conformance.report.terminal import shown
from mla_conformance.version import SUITE_VERSION


def report_file(path: Path) -> Path:
    """The report that a path names: a file, or the one in a run's folder."""
    return path / "report.json" if path.is_dir() else path


def is_report(path: Path) -> bool:
    path = report_file(path)
    try:
        return path.is_file() and decode(read_text(path), _Head, str(path)).schema.startswith(f"{SCHEMA_NAME}/")
    except InputError:
        return False


def load_report(path: Path) -> summary.RunSummary:
    """The run that a report file, or the one in a run's folder, tells of."""
    path = report_file(path)
    text = read_text(path)
    schema = decode(text, _Head, str(path)).schema
    name, _, version = schema.partition("/")
    if name != SCHEMA_NAME or not (version.isascii() and version.isdecimal() and len(version) < 9):
        raise InputError(f"{path}: expected a report with schema {SCHEMA_NAME}/{SCHEMA_VERSION}, got {_brief(schema)}")
    if int(version) != SCHEMA_VERSION:
        age = "newer" if int(version) > SCHEMA_VERSION else "older"
        raise InputError(f"{path}: schema {schema} is {age} than {SCHEMA_NAME}/{SCHEMA_VERSION}, which is read here")
    report = decode(text, ReportForm, str(path))
    try:
        run = _run(report, str(path))
    except ValueError as error:
        raise InputError(f"{path}: malformed report: {error}") from error
    for backend in run.backends if report.suite == SUITE_VERSION else ():  # other suites have other spaces
        if backend.pairs and dict(backend.pairs) != summary.judged_pairs(backend.records, backend.facts.fitted):
            raise InputError(
                f"{path}: {backend.name}: the pairs that it says were judged do not follow from its records"
            )
    for place, found, expected in differences(msgspec.to_builtins(report), msgspec.to_builtins(report_form(run))):
        raise InputError(f"{path}: {place} is {_brief(found)}, but {_brief(expected)} follows from the records")
    return run


_NAME = re.compile(r"[\w.+-]{1,200}(\[[\w.+-]{1,200}\])?")
"""A registered name, one with a variant, or the name of a class."""
_EXPECTED = (Status.EXPECTED_FAILURE, Status.UNEXPECTED_PASS)


class _Head(msgspec.Struct):
    schema: str = ""


def _run(report: ReportForm, source: str) -> summary.RunSummary:
    shard, cases = report.shard, report.cases
    if shard and not 1 <= shard.index <= shard.count <= len(cases):
        raise ValueError(f"there is no shard {shard}")
    own = shard.cases if shard else cases
    if len(set(cases)) < len(cases) or not set(own) <= set(cases):
        raise ValueError("the list of cases holds a case twice, or lacks one of its shard")
    for case in cases:
        require_id(case)
    missing = [name for name in ENVIRONMENT if name not in report.environment]
    if missing:
        raise ValueError(f"the environment lacks {', '.join(missing)}")
    salt, role = (report.environment.get(name, "") for name in ("salt", "role"))
    path, _, digest = role.partition("@")
    if digest and digest != outside().partition("@")[2]:
        raise ValueError(f"its cases are of a role from outside; expected --role {path}, as it was: {digest}")
    backends = tuple(
        _backend(name, part, (*own, *(shard.share(part.fitted) if shard else part.fitted)), salt, role)
        for name, part in report.backends.items()
    )
    reported = {"suite": report.suite, **report.environment}
    return summary.RunSummary(reported, backends, cases, shard, report.deployment, source, report.date, report.code)


def _backend(name: str, part: BackendForm, cases: Sequence[str], salt: str, role: str) -> summary.BackendSummary:
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a name such as MINE or MINE[variant] of a backend, got {_brief(name)}")
    records = list(_records(name, part, salt, role))
    judged = {record.key for record in records}
    if len(judged) < len(records) or not judged <= {*cases, EXPLORED}:
        raise ValueError(f"{name} has two records of one case, or one of a case that is not listed")
    unmapped = part.heat.keys() - {record.case for record in records if is_mapped(record)}
    if unmapped:
        raise ValueError(f"{name} has a heat map of {_brief(min(unmapped))}, which does not fail by a wrong number")
    drawn = [EXPLORED] if EXPLORED in part.capabilities else []
    capabilities = () if part.reasons else summary.summarise(records, (*cases, *drawn))
    pairs = {role: summary.JudgedPairs(**msgspec.structs.asdict(pairs)) for role, pairs in part.pairs.items()}
    deviations = tuple((deviation.library, deviation.adapter) for deviation in part.deviations)
    known = (each.name for each in fields(BackendFacts) if each.name in BackendForm.__struct_fields__)
    facts = BackendFacts(**{each: getattr(part, each) for each in known} | {"name": name, "deviations": deviations})
    about = part.stopped, part.traced, part.heat, pairs, part.traits, part.speed or None
    return summary.BackendSummary(facts, capabilities, *about)


def _records(name: str, part: BackendForm, salt: str, role: str) -> Iterator[Record]:
    failures = {(capability, f.case): f for capability, entry in part.capabilities.items() for f in entry.failures}
    for entry in part.records:
        capability = entry.capability or entry.case.partition(":")[0]
        if entry.evidence is not None and entry.evidence >= len(part.evidence):
            raise ValueError(f"{name} has no evidence {entry.evidence}, which the record of {entry.case} names")
        case = Case.parse(entry.case)
        said = said_of(failures.get((capability, entry.case), entry))
        if (said["judged"] is not None) != (entry.status in _EXPECTED):
            raise ValueError(f"{name} {entry.case}: {entry.status} does not go with a status before, {said['judged']}")
        if said["too_large"] and entry.status is not Status.UNAVAILABLE:
            raise ValueError(f"{name} {entry.case}: {entry.status}, yet too large to be judged")
        yield Record(
            backend=name,
            reference=part.reference,
            capability=capability,
            case=entry.case,
            status=entry.status,
            seconds=entry.seconds,
            cases=entry.cases,
            sampled=msgspec.to_builtins(entry.sampled) if entry.sampled else {},
            evidence=part.evidence[entry.evidence] if entry.evidence is not None else {},
            salt=salt,
            role=role if case.role.file else "",
            **said,
        )


def _brief(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False), 80)


def merge_shards(runs: Sequence[summary.RunSummary]) -> summary.RunSummary:
    for run in runs:
        if run.shard is None:
            raise InputError(f"{run.source}: expected the report of a shard (certify --shard I/N), got a whole run's")
        if any(record.capability == EXPLORED for record in run.records):
            raise InputError(f"{run.source}: holds drawn cases, which no shard has")
    first, *others = runs
    for run in others:
        for what, expected, found in _unlike(first, run):
            raise InputError(f"{run.source}: expected the {what} of {first.source}, {expected}, got {found}")
        if run.cases != first.cases:
            raise InputError(f"{run.source}: expected the list of cases of {first.source}, got another")
    require_one_code(runs)
    _require_partition([(run.source, run.shard) for run in runs if run.shard], first.cases)
    parts = zip(*(run.backends for run in runs), strict=True)
    joined = tuple(_joined(part, first.cases) for part in parts)
    code = {place: digest for run in runs for place, digest in run.code.items()}
    return summary.RunSummary(first.environment, joined, first.cases, date=max(run.date for run in runs), code=code)


def require_one_code(runs: Sequence[summary.RunSummary]) -> None:
    """Refuse runs in which one name stands for several codes: their verdicts do not add up."""
    known: dict[tuple[str, str], tuple[str, summary.RunSummary]] = {}
    for run in runs:
        for backend in run.backends:
            facts = {"reference": backend.facts.reference, "fingerprint": backend.facts.fingerprint}
            for what, found in ({} if backend.reasons else {**facts, **run.code}).items():
                expected, other = known.setdefault((backend.name, what), (found, run))
                if found != expected:
                    raise InputError(
                        f"{run.source}: {backend.name} is other code than in {other.source}: {what} {_brief(found)}, "
                        f"there {_brief(expected)}; judge one code, or take the reports one by one"
                    )


def _unlike(first: summary.RunSummary, run: summary.RunSummary) -> Iterator[tuple[str, object, object]]:
    """What the shards of one list have in common and these have not, the most telling first: name, expected, found."""
    yield from differing(first.environment, run.environment)
    names = ([backend.name for backend in each.backends] for each in (first, run))
    yield from differing(*({"choice of backends": each} for each in names))
    for mine, theirs in zip(first.backends, run.backends, strict=True):
        for name, *values in differing(vars(mine.facts), vars(theirs.facts)):
            yield f"{name} of {mine.name}", *values


def _require_partition(shards: Sequence[tuple[str, Shard]], cases: Sequence[str]) -> None:
    """Every shard of one division once, and every case of the list in exactly one of them."""
    counts = {shard.count for _, shard in shards}
    if len(counts) > 1:
        raise InputError(f"expected shards of one division, got {', '.join(str(shard) for _, shard in shards)}")
    holder: dict[int, str] = {}
    for name, shard in shards:
        if shard.index in holder:
            raise InputError(f"{name}: expected each shard once, got {shard} here and in {holder[shard.index]}")
        holder[shard.index] = name
    (count,) = counts
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in holder]
    if missing:
        raise InputError(f"{', '.join(holder.values())}: missing shard {', '.join(missing)}")
    owner: dict[str, str] = {}
    for name, shard in shards:
        for case in shard.cases:
            if case in owner:
                raise InputError(f"{name}: overlaps with {owner[case]}: both hold {case}")
            owner[case] = name
    absent = [case for case in cases if case not in owner]
    if absent:
        raise InputError(f"{len(absent)} cases of the list are in no shard, the first is {absent[0]}")


def _joined(parts: Sequence[summary.BackendSummary], cases: Sequence[str]) -> summary.BackendSummary:
    position = {case: index for index, case in enumerate((*cases, *parts[0].facts.fitted))}
    records = sorted((record for part in parts for record in part.records), key=lambda record: position[record.case])
    first = parts[0]
    if first.reasons:
        return first
    stopped = "; ".join(dict.fromkeys(part.stopped for part in parts if part.stopped))
    traced = reduce(Traced.joined, (part.traced for part in parts))
    heat = {case: heat_map for part in parts for case, heat_map in part.heat.items()}
    pairs = summary.judged_pairs(records, first.facts.fitted) if any(part.pairs for part in parts) else {}
    traits = next((part.traits for part in parts if part.traits), NO_TRAITS)
    capabilities = summary.summarise(records, position)
    return summary.BackendSummary(first.facts, capabilities, stopped, traced, heat, pairs, traits)
