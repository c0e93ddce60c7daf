"""``report.json``: the outcome of a run as data for machines; its form by name and type, and what stands in it.

``mla-conformance report schema`` prints the form as a JSON Schema.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mla_conformance.cases.sharding import Shard
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.files.whole import write_whole
from mla_conformance.judging.record import EXPLORED, Said, Share, Traced, written
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.judging.verdict import Status
from mla_conformance.models.profile import Deployment
from mla_conformance.report.causes import CauseKind
from mla_conformance.report.summary import BackendOutcome, BackendSummary, Counts, Number, RunSummary, worst
from mla_conformance.speed.times import Speed

SCHEMA_NAME = "mla-conformance-report"
SCHEMA_VERSION = 5
SCHEMA = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
ENVIRONMENT = ("tier", "device", "torch")  # what of the environment every view shows

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

    rows: Number
    of: Annotated[int, Meta(ge=1, le=2**53)]
    drawn: Number


class RecordForm(Said, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A case that was run, without what is empty; what is said of a failure stands with its capability."""

    case: str
    status: Status
    seconds: Annotated[float, Meta(ge=0)]
    evidence: Annotated[Number | None, Meta(description="Index into the backend's evidence.")] = None
    capability: Annotated[Literal["", "explored"], Meta(description="Of drawn cases, which are in no list.")] = ""
    cases: Annotated[int, Meta(ge=1, le=2**53, description="How many drawn cases it stands for.")] = 1
    sampled: SampledForm | None = None


class CapabilityForm(Counts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One capability of one backend."""

    status: BackendOutcome
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


class PairsForm(_Form, frozen=True, kw_only=True):
    """Pairs of classes of a role's space."""

    claimed: Annotated[Number, Meta(description="Of what the backend declares.")]
    judged: Number
    not_judged: Annotated[tuple[str, ...], Meta(description="Those that were claimed and not judged.")]


class BackendForm(_Form, frozen=True, kw_only=True):
    """One backend."""

    status: BackendOutcome
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
    pairs: Annotated[dict[str, PairsForm], Meta(description="By role, of a tier that holds every pair of classes.")]
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
    shard: Annotated[Shard | None, Meta(description="Which part of the list this run was to judge.")]
    date: Annotated[str, Meta(description="ISO date on which the run ended.")] = ""
    deployment: Annotated[Deployment | None, Meta(description="The model that the cases are of, if they are.")] = None
    code: Annotated[_Texts, Meta(description="SHA-256 of the modules that backends loaded and no wheel holds.")] = {}
    backends: dict[str, BackendForm]


def schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(ReportForm)}


def report_json(run: RunSummary) -> dict[str, Any]:
    """The report as plain data; the keys are part of the interface."""
    plain: dict[str, Any] = msgspec.to_builtins(report_form(run))
    return plain


def report_form(run: RunSummary) -> ReportForm:
    return _form(
        ReportForm,
        run,
        suite=run.environment["suite"],
        environment={name: value for name, value in run.environment.items() if name != "suite"},
        code=dict(run.code),
        backends={backend.name: _backend(backend) for backend in run.backends},
    )


_F = TypeVar("_F", bound=Struct)


def _form(form: type[_F], *sources: Any, **own: Any) -> _F:
    """A form with these values, and otherwise what the first of the sources that has a field's name says of it."""
    names = [name for name in form.__struct_fields__ if name not in own and name != "schema"]
    return form(**{name: next(getattr(each, name) for each in sources if hasattr(each, name)) for name in names}, **own)


def _backend(backend: BackendSummary) -> BackendForm:
    evidence, causes = backend.evidence, []
    for cause in backend.causes if backend.counts.failed else ():
        cases, example = tuple(record.case for record in cause.failures), cause.example
        causes.append(_form(CauseForm, cause, cases=cases, example=example.case, replay=example.replay))
    places = {frozenset(each.items()): place for place, each in enumerate(evidence)}
    capabilities = {}
    for capability in backend.capabilities:
        used = written(worst(share for record in capability.records for share in record.shares.values()))
        failures = tuple(_form(FailureForm, record) for record in capability.failures)
        own = {"status": capability.outcome, "error_budget_used": used, "failures": failures}
        capabilities[capability.name] = _form(CapabilityForm, capability.counts, **own)
    records = [
        _form(
            RecordForm,
            Said() if record.failed else record,  # what is said of a failure stands with its capability
            record,
            evidence=places.get(frozenset(record.evidence.items())),
            capability=EXPLORED if record.key != record.case else "",
            sampled=SampledForm(**record.sampled) if record.sampled else None,
        )
        for record in backend.records
    ]
    return _form(
        BackendForm,
        backend,
        backend.facts,
        status=backend.outcome,
        evidence=tuple(evidence),
        deviations=tuple(DeviationForm(library=said, adapter=done) for said, done in backend.facts.deviations),
        pairs={role: _form(PairsForm, pairs) for role, pairs in backend.pairs.items()},
        causes=tuple(causes),
        heat=dict(backend.heat),
        speed=backend.speed or UNSET,
        capabilities=capabilities,
        records=tuple(records),
    )


def said_of(record: Said) -> dict[str, Any]:
    """What is said of a case, by the names of its fields, from any form of a record."""
    return {name: getattr(record, name) for name in Said.__struct_fields__}


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_whole(path, to_text(data))


def to_text(data: dict[str, Any] | ReportForm) -> str:
    """The text of a JSON file; what no UTF-8 can hold, such as half of a surrogate pair, becomes a question mark."""
    text = json.dumps(msgspec.to_builtins(data), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", errors="replace").decode("utf-8")
