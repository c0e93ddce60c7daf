"""``report.json``: the outcome of a run as data for machines and its form; only what a run wrote is read back."""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mla_conformance.backends.roles import outside
from mla_conformance.cases import grammar, sharding
from mla_conformance.cases.case import Case
from mla_conformance.diagnosis.heat_map import HeatMap, is_mapped
from mla_conformance.files.whole import InputError, decode, read_text
from mla_conformance.judging.record import EXPLORED, BackendFacts, Record, Said, Share, Status, Traced, written
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.models.profile import Deployment
from mla_conformance.report import summary, terminal
from mla_conformance.report.causes import CauseKind
from mla_conformance.report.differences import differences, differing
from mla_conformance.speed.times import Speed
from mla_conformance.version import SUITE_VERSION

SCHEMA_NAME = "mla-conformance-report"
SCHEMA_VERSION = 5
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
ENVIRONMENT = ("tier", "device", "torch")  # what of the environment every view shows

_F = TypeVar("_F", bound=Struct)
_CaseList = Annotated[tuple[str, ...], Meta(extra_json_schema={"uniqueItems": True})]
_Texts = dict[str, str]


class _Form(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FailureForm(Said, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure, with all that is said of it."""

    case: str
    status: Status
    replay: Annotated[str, Meta(description="The command that runs the case again.")]


class SampledForm(_Form, frozen=True, kw_only=True):
    """Judged rows, rows of the batch, and how many were drawn at random."""

    rows: summary.Number
    of: Annotated[int, Meta(ge=1, le=2**53)]
    drawn: summary.Number


class RecordForm(Said, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A case that was run, without what is empty; what is said of a failure stands with its capability."""

    case: str
    status: Status
    seconds: Annotated[float, Meta(ge=0)]
    evidence: Annotated[summary.Number | None, Meta(description="Index into the backend's evidence.")] = None
    capability: Annotated[Literal["", "explored"], Meta(description="Of drawn cases, which are in no list.")] = ""
    cases: Annotated[int, Meta(ge=1, le=2**53, description="How many drawn cases it stands for.")] = 1
    sampled: SampledForm | None = None


class CapabilityForm(summary.Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One capability of one backend."""

    status: summary.BackendOutcome
    error_budget_used: Share
    failures: tuple[FailureForm, ...]


class CauseForm(_Form, frozen=True, kw_only=True):
    """What is wrong with a backend, and the failures of it."""

    sentence: str
    kind: Annotated[CauseKind, Meta(description="Likely, further and perhaps of the same origin, or only seen.")]
    capabilities: tuple[str, ...]
    clauses: Annotated[tuple[str, ...], Meta(description="Clauses of SPEC.md that are broken.")]
    cases: Annotated[tuple[str, ...], Meta(description="Ids of the cases that fail of it.")]
    example: Annotated[str, Meta(description="The simplest one: fewest fields, then least heads × tokens.")]
    replay: Annotated[str, Meta(description="The command that runs the example again.")]
    used: Annotated[tuple[float, float] | None, Meta(description="Least and largest error by its budget.")]


class DeviationForm(_Form, frozen=True, kw_only=True):
    """A convention of a library that differs from the contract, and what the adapter does about it."""

    library: str
    adapter: str


class BackendForm(_Form, frozen=True, kw_only=True):
    """One backend."""

    status: summary.BackendOutcome
    reference: Annotated[str, Meta(description="What --backend takes.")]
    reasons: Annotated[tuple[str, ...], Meta(description="Why it is unavailable; empty if it was run.")]
    stopped: Annotated[str, Meta(description="Why the rest of its cases was not run, or empty.")]
    versions: _Texts
    evidence: Annotated[tuple[_Texts, ...], Meta(description="What the library says of the kernels that ran.")]
    traced: Annotated[Traced, Meta(description="Kernels and libraries that were seen to run, on a GPU.")]
    emulated: bool
    rounding: _Texts
    deviations: tuple[DeviationForm, ...]
    fingerprint: Annotated[str, Meta(description="Differs if the backend changed.")]
    fitted: Annotated[_CaseList, Meta(description="Ids of the cases that were made for what it declares.")]
    region: Annotated[
        str, Meta(description="Digest of the spaces, and of the cases that were fitted to what it declares.")
    ]
    pairs: Annotated[
        dict[str, summary.JudgedPairs], Meta(description="By role, of a tier that holds every pair of classes.")
    ]
    capabilities: dict[str, CapabilityForm]
    causes: Annotated[tuple[CauseForm, ...], Meta(description="What is wrong, likely causes first, then by cases.")]
    heat: Annotated[dict[str, HeatMap], Meta(description="Where errors are over their budget, by failing case.")]
    traits: Annotated[Traits, Meta(description="When bits are the same and how errors are spread, if asked.")] = (
        NO_TRAITS
    )
    speed: Annotated[Speed | UnsetType, Meta(description="Times, by the library's own word, if asked.")] = UNSET
    records: Annotated[tuple[RecordForm, ...], Meta(description="One per case that was run, one for all drawn cases.")]


class ReportForm(_Form, frozen=True, kw_only=True):
    """A run of mla-conformance certify."""

    schema: Annotated[str, Meta(extra_json_schema={"const": SCHEMA})] = SCHEMA
    suite: Annotated[str, Meta(description="Version of the suite and its case list.")]
    environment: Annotated[_Texts, Meta(extra_json_schema={"required": ENVIRONMENT})]
    cases: Annotated[_CaseList, Meta(description="Ids of the whole case list, of all shards.")]
    shard: Annotated[sharding.Shard | None, Meta(description="Which part of the list this run was to judge.")]
    date: Annotated[str, Meta(description="ISO date on which the run ended.")] = ""
    deployment: Annotated[Deployment | None, Meta(description="The model that the cases are of, if they are.")] = None
    code: Annotated[_Texts, Meta(description="SHA-256 of the modules that backends loaded and no wheel holds.")] = {}
    backends: dict[str, BackendForm]


def schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(ReportForm)}


def _form(form: type[_F], *sources: Any, **own: Any) -> _F:
    """A form with these values, and otherwise what the first of the sources that has a field's name says of it."""
    names = [name for name in form.__struct_fields__ if name not in own and name != "schema"]
    return form(**{name: next(getattr(each, name) for each in sources if hasattr(each, name)) for name in names}, **own)


def report_form(run: summary.RunSummary) -> ReportForm:
    forms = dict[str, BackendForm]()
    for backend in run.backends:
        causes, capabilities, records = list[CauseForm](), dict[str, CapabilityForm](), list[RecordForm]()
        own: dict[str, Any]
        for cause in backend.causes if backend.counts.failed else ():
            cases, example = tuple(record.case for record in cause.failures), cause.example
            causes.append(_form(CauseForm, cause, cases=cases, example=example.case, replay=example.replay))
        for capability in backend.capabilities:
            used = written(summary.worst(share for record in capability.records for share in record.shares.values()))
            failures = tuple(_form(FailureForm, record) for record in capability.failures)
            own = {"status": capability.outcome, "error_budget_used": used, "failures": failures}
            capabilities[capability.name] = _form(CapabilityForm, capability.counts, **own)
        places = {frozenset(each.items()): place for place, each in enumerate(backend.evidence)}
        for record in backend.records:
            own = {"evidence": places.get(frozenset(record.evidence.items()))}
            own["capability"] = EXPLORED if record.key != record.case else ""
            own["sampled"] = SampledForm(**record.sampled) if record.sampled else None
            # What is said of a failure stands with its capability.
            records.append(_form(RecordForm, Said() if record.failed else record, record, **own))
        deviations = (DeviationForm(library=said, adapter=done) for said, done in backend.facts.deviations)
        lists = {"evidence": tuple(backend.evidence), "deviations": tuple(deviations), "causes": tuple(causes)}
        about = {"status": backend.outcome, "speed": backend.speed or UNSET, "capabilities": capabilities, **lists}
        forms[backend.name] = _form(BackendForm, backend, backend.facts, records=tuple(records), **about)
    environment = dict(run.environment)
    whole: dict[str, Any] = {"suite": environment.pop("suite"), "environment": environment, "code": dict(run.code)}
    return _form(ReportForm, run, **whole, backends=forms)


_FLAT_LIST = re.compile(r'\[\n(?: +(?:"(?:[^"\\]|\\.)*"|[-+.\w]+),?\n)+ *\]')
_LINE = 120


def to_text(data: dict[str, Any] | Struct) -> str:
    """The text of a JSON file, a short list on a line; what no UTF-8 can hold becomes a question mark."""

    def on_a_line(found: re.Match[str]) -> str:
        line = json.dumps(json.loads(found[0]), ensure_ascii=False)
        return line if len(line) <= _LINE else found[0]

    text = _FLAT_LIST.sub(on_a_line, json.dumps(msgspec.to_builtins(data), indent=1, ensure_ascii=False) + "\n")
    return text.encode("utf-8", errors="replace").decode("utf-8")


def report_file(path: Path) -> Path:
    """The report that a path names: a file, or the one in a run's folder."""
    return path / "report.json" if path.is_dir() else path


def is_report(path: Path) -> bool:
    with contextlib.suppress(InputError):
        path = report_file(path)
        return path.is_file() and decode(read_text(path), _Head, str(path)).schema.startswith(f"{SCHEMA_NAME}/")
    return False


class _Head(Struct):
    schema: str = ""


def load_report(path: Path) -> summary.RunSummary:
    path = report_file(path)
    schema = decode(text := read_text(path), _Head, str(path)).schema
    name, _, version = schema.partition("/")
    if name != SCHEMA_NAME or not (version.isascii() and version.isdecimal() and len(version) < 9):
        raise InputError(f"{path}: expected a report with schema {SCHEMA_NAME}/{SCHEMA_VERSION}, got {_brief(schema)}")
    if int(version) != SCHEMA_VERSION:
        age = "newer" if int(version) > SCHEMA_VERSION else "older"
        raise InputError(f"{path}: schema {schema} is {age} than {SCHEMA_NAME}/{SCHEMA_VERSION}, which is read here")
    report = decode(text, ReportForm, str(path))
    try:
        run = _run_of(report, str(path))
    except ValueError as error:
        raise InputError(f"{path}: malformed report: {error}") from error
    for backend in run.backends if report.suite == SUITE_VERSION else ():  # other suites have other spaces
        if backend.pairs and dict(backend.pairs) != summary.judged_pairs(backend.records, backend.facts.fitted):
            said = "the pairs that it says were judged do not follow from its records"
            raise InputError(f"{path}: {backend.name}: {said}")
    for place, found, expected in differences(msgspec.to_builtins(report), msgspec.to_builtins(report_form(run))):
        raise InputError(f"{path}: {place} is {_brief(found)}, but {_brief(expected)} follows from the records")
    return run


_NAME = re.compile(r"[\w.+-]{1,200}(\[[\w.+-]{1,200}\])?")  # a registered name, one with a variant, or of a class


def _run_of(report: ReportForm, source: str) -> summary.RunSummary:
    shard, cases = report.shard, report.cases
    if shard and not 1 <= shard.index <= shard.count <= len(cases):
        raise ValueError(f"there is no shard {shard}")
    if len(set(cases)) < len(cases) or (shard and not set(shard.cases) <= set(cases)):
        raise ValueError("the list of cases holds a case twice, or lacks one of its shard")
    for case in cases:
        grammar.require_id(case)
    if missing := [name for name in ENVIRONMENT if name not in report.environment]:
        raise ValueError(f"the environment lacks {', '.join(missing)}")
    salt, role = (report.environment.get(name, "") for name in ("salt", "role"))
    path, _, digest = role.partition("@")
    if digest and digest != outside().partition("@")[2]:
        raise ValueError(f"its cases are of a role from outside; expected --role {path}, as it was: {digest}")
    backends = tuple(_backend_of(name, part, report, salt, role) for name, part in report.backends.items())
    reported = {"suite": report.suite, **report.environment}
    return summary.RunSummary(reported, backends, cases, shard, report.deployment, source, report.date, report.code)


def _backend_of(name: str, part: BackendForm, report: ReportForm, salt: str, role: str) -> summary.BackendSummary:
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a name such as MINE or MINE[variant] of a backend, got {_brief(name)}")
    records, shard = list(_records(name, part, salt, role)), report.shard
    cases = (*shard.cases, *shard.share(part.fitted)) if shard else (*report.cases, *part.fitted)
    judged = {record.key for record in records}
    if len(judged) < len(records) or not judged <= {*cases, EXPLORED}:
        raise ValueError(f"{name} has two records of one case, or one of a case that is not listed")
    if unmapped := part.heat.keys() - {record.case for record in records if is_mapped(record)}:
        raise ValueError(f"{name} has a heat map of {_brief(min(unmapped))}, which does not fail by a wrong number")
    drawn = [EXPLORED] if EXPLORED in part.capabilities else []
    deviations = tuple((deviation.library, deviation.adapter) for deviation in part.deviations)
    known = (each.name for each in fields(BackendFacts) if each.name in BackendForm.__struct_fields__)
    facts = BackendFacts(**{each: getattr(part, each) for each in known} | {"name": name, "deviations": deviations})
    about = part.stopped, part.traced, part.heat, part.pairs, part.traits, part.speed or None
    return summary.BackendSummary(facts, () if part.reasons else summary.summarise(records, (*cases, *drawn)), *about)


def _records(name: str, part: BackendForm, salt: str, role: str) -> Iterator[Record]:
    failures = {(capability, f.case): f for capability, entry in part.capabilities.items() for f in entry.failures}
    for entry in part.records:
        capability = entry.capability or entry.case.partition(":")[0]
        if entry.evidence is not None and entry.evidence >= len(part.evidence):
            raise ValueError(f"{name} has no evidence {entry.evidence}, which the record of {entry.case} names")
        said = failures.get((capability, entry.case), entry)
        if (said.judged is not None) != (entry.status in (Status.EXPECTED_FAILURE, Status.UNEXPECTED_PASS)):
            raise ValueError(f"{name} {entry.case}: {entry.status} does not go with a status before, {said.judged}")
        if said.too_large and entry.status is not Status.UNAVAILABLE:
            raise ValueError(f"{name} {entry.case}: {entry.status}, yet too large to be judged")
        about: dict[str, Any] = {"backend": name, "capability": capability, "status": entry.status, "salt": salt}
        about["role"] = role if Case.parse(entry.case).role.file else ""
        about["evidence"] = part.evidence[entry.evidence] if entry.evidence is not None else {}
        about["sampled"] = msgspec.to_builtins(entry.sampled) if entry.sampled else {}
        yield _form(Record, said, entry, part, **about)


def _brief(value: Any) -> str:
    return terminal.shown(json.dumps(value, ensure_ascii=False), 80)


def merge_shards(runs: Sequence[summary.RunSummary]) -> summary.RunSummary:
    for run in runs:
        if run.shard is None:
            raise InputError(f"{run.source}: expected the report of a shard (certify --shard I/N), got a whole run's")
        if any(record.capability == EXPLORED for record in run.records):
            raise InputError(f"{run.source}: holds drawn cases, which no shard has")
    first, *others = runs
    for run in others:
        names = ({"choice of backends": [backend.name for backend in each.backends]} for each in (first, run))
        unlike = [*differing(first.environment, run.environment), *differing(*names)]
        for mine, theirs in zip(first.backends, run.backends, strict=False):
            facts = differing(vars(mine.facts), vars(theirs.facts))
            unlike += [(f"{name} of {mine.name}", *values) for name, *values in facts]
        for what, expected, found in unlike[:1]:  # the most telling
            raise InputError(f"{run.source}: expected the {what} of {first.source}, {expected}, got {found}")
        if run.cases != first.cases:
            raise InputError(f"{run.source}: expected the list of cases of {first.source}, got another")
    require_one_code(runs)
    _require_partition([(run.source, run.shard) for run in runs if run.shard], first.cases)
    joined = list[summary.BackendSummary]()
    for parts in zip(*(run.backends for run in runs), strict=True):
        facts = parts[0].facts
        if facts.reasons:
            joined.append(parts[0])
            continue
        position = {case: index for index, case in enumerate((*first.cases, *facts.fitted))}
        records = sorted((record for part in parts for record in part.records), key=lambda each: position[each.case])
        stopped = "; ".join(dict.fromkeys(part.stopped for part in parts if part.stopped))
        traced = reduce(Traced.joined, (part.traced for part in parts))
        heat = {case: heat_map for part in parts for case, heat_map in part.heat.items()}
        pairs = summary.judged_pairs(records, facts.fitted) if any(part.pairs for part in parts) else {}
        traits = next((part.traits for part in parts if part.traits), NO_TRAITS)
        capabilities = summary.summarise(records, position)
        joined.append(summary.BackendSummary(facts, capabilities, stopped, traced, heat, pairs, traits))
    code, date = {place: digest for run in runs for place, digest in run.code.items()}, max(run.date for run in runs)
    return summary.RunSummary(first.environment, tuple(joined), first.cases, date=date, code=code)


def require_one_code(runs: Sequence[summary.RunSummary]) -> None:
    """Refuse runs in which one name stands for several codes: their verdicts do not add up."""
    known: dict[tuple[str, str], tuple[str, summary.RunSummary]] = {}
    for run in runs:
        for backend in run.backends:
            facts = {"reference": backend.facts.reference, "fingerprint": backend.facts.fingerprint}
            for what, found in ({} if backend.reasons else {**facts, **run.code}).items():
                expected, other = known.setdefault((backend.name, what), (found, run))
                if found != expected:
                    said = f"{backend.name} is other code than in {other.source}: {what} {_brief(found)}"
                    todo = "judge one code, or take the reports one by one"
                    raise InputError(f"{run.source}: {said}, there {_brief(expected)}; {todo}")


def _require_partition(shards: Sequence[tuple[str, sharding.Shard]], cases: Sequence[str]) -> None:
    """Every shard of one division once, and every case of the list in exactly one of them."""
    count, holder, owner = shards[0][1].count, dict[int, str](), dict[str, str]()
    if any(shard.count != count for _, shard in shards):
        raise InputError(f"expected shards of one division, got {', '.join(str(shard) for _, shard in shards)}")
    for name, shard in shards:
        if shard.index in holder:
            raise InputError(f"{name}: expected each shard once, got {shard} here and in {holder[shard.index]}")
        holder[shard.index] = name
    missing = [f"{index}/{count}" for index in range(1, count + 1) if index not in holder]
    if missing:
        raise InputError(f"{', '.join(holder.values())}: missing shard {', '.join(missing)}")
    for name, shard in shards:
        for case in shard.cases:
            if case in owner:
                raise InputError(f"{name}: overlaps with {owner[case]}: both hold {case}")
            owner[case] = name
    if absent := [case for case in cases if case not in owner]:
        raise InputError(f"{len(absent)} cases of the list are in no shard, the first is {absent[0]}")
