"""What a certificate holds, and what a sanitizer reported of its kernel."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.certificate.pins import Pins
from mla_conformance.files.whole import InputError, decode, read_text
from mla_conformance.judging import record, verdict
from mla_conformance.judging.traits import Traits
from mla_conformance.report import json_report, summary
from mla_conformance.speed.times import Speed
from mla_conformance.traits.sanitizer import TOOLS
from mla_conformance.version import SUITE_VERSION

RECORDS = f"fixtures/records/{SUITE_VERSION}.jsonl"  # the file of this suite's records, in a checkout
_NAME, _VERSION = "mla-conformance-certificate", 6
SCHEMA = f"{_NAME}/{_VERSION}"

Text = Annotated[str, Meta(min_length=1)]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure that an expectation waives; early records do not say what it looks like."""

    case: str
    status: verdict.Status | None
    check: str
    message: str
    expectation: str
    explanation: str | UnsetType = UNSET


class Unjudged(Struct, frozen=True, forbid_unknown_fields=True):
    case: str
    reason: str


class Worst(Struct, frozen=True, forbid_unknown_fields=True):
    share: Annotated[float, Meta(ge=0, le=1)]
    case: str


class Certificate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a complete run of one real kernel found: its record, and a certificate if it lacks no must-pass case."""

    schema: str = SCHEMA
    suite: Text
    version: Text
    tier: Text
    date: Text
    backend: Text
    reference: Text
    device: Text
    environment: dict[str, str]
    pins: Pins
    rounding: dict[str, str]
    deviations: tuple[json_report.DeviationForm, ...]
    evidence: tuple[dict[str, str], ...]
    traced: record.Traced
    digests: dict[str, str]
    counts: summary.Counts
    worst: dict[str, Worst]
    seconds: Annotated[float, Meta(ge=0)]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, verdict.Status]
    traits: Traits | UnsetType = UNSET
    speed: Speed | UnsetType = UNSET
    seal: str = ""

    @property
    def is_current(self) -> bool:
        return self.suite == SUITE_VERSION

    @property
    def salt(self) -> str:
        return self.environment.get("salt", "")

    @property
    def distributions(self) -> dict[str, str]:
        """The versions that its adapters declare, or else all that are pinned."""
        pinned = self.pins.versions
        return {name: pinned[name] for name in _declared(self.reference) if name in pinned} or pinned


@cache
def _declared(reference: str) -> tuple[str, ...]:
    """Of a registered backend; nothing of any other, whose code a record must not run."""
    from mla_conformance.backends.declaration import declaration_of  # torch, which a list of commands does without
    from mla_conformance.backends.loading import load_role, roles_of

    try:
        backend = parse_reference(reference)
        roles = roles_of(backend) if backend.members() else ()
        declared = [declaration_of(load_role(backend, role)).distributions for role in roles]
    except (BackendReferenceError, ImportError):
        return ()
    return tuple(dict.fromkeys(name for names in declared for name in names))


def renewal(reference: str, device: str) -> str:
    where = f"--device {'cpu' if device == 'cpu' else 'cuda'}"
    return f"mla-conformance certify --backend {shlex.quote(reference)} {where} --submission {RECORDS}"


class Outdated(InputError):
    """A certificate that an earlier suite wrote in a form of its own."""


class _Head(Struct):
    schema: str = ""
    suite: str = ""
    reference: str = ""
    device: str = ""


def read_certificate(path: Path) -> Certificate:
    head = decode(text := read_text(path), _Head, str(path))
    name, _, version = head.schema.partition("/")
    if name == _NAME and version in map(str, range(1, _VERSION)):
        raise Outdated(
            f"{path}: of suite {head.suite}, whose form {head.schema} pins too little to be verified; renew it: "
            f"{renewal(head.reference, head.device)}"
        )
    if head.schema != SCHEMA:
        raise InputError(f"{path}: expected a certificate of schema {SCHEMA}, got {head.schema!r}")
    return decode(text, Certificate, str(path))


def records_of(backend: str, reference: str, cases: Mapping[str, verdict.Status]) -> list[record.Record]:
    return [record.Record(backend, reference, case.partition(":")[0], case, status) for case, status in cases.items()]


SANITIZED = "mla-conformance-sanitized/1"


class SanitizerFinding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kernel: Text  # its name
    cause: str  # what the tool says
    count: Annotated[int, Meta(ge=1)]  # how often
    place: str = ""  # of the source; empty if it is not told
    launch: str = ""  # the line of Python that launched the first; empty if none did
    case: Text  # the first that shows it


class SanitizedKernel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str = SANITIZED
    suite: Text
    version: Text  # of this project
    date: Text
    backend: Text
    reference: Text
    device: Text
    environment: dict[str, str]  # device, driver, CUDA, torch and Python
    versions: dict[str, str]  # of the distributions behind the backend
    tool: Text  # of compute-sanitizer
    tool_version: Text
    tool_cuda: str = ""  # the CUDA toolkit that it is of; empty where that does not tell
    # seconds of the calls of each case that the tool watched
    checked: Annotated[dict[str, Annotated[float, Meta(ge=0)]], Meta(min_length=1)]
    unchecked: dict[str, str] = {}  # why it watched nothing, of each other case
    errors: tuple[SanitizerFinding, ...] = ()  # what it reports


def sanitized_problems(certificate: Certificate, sanitized: Sequence[SanitizedKernel]) -> Iterator[str]:
    """What tools reported of another kernel, suite or version than a record's, or in no form that is known."""
    for found in sanitized:
        if found.schema != SANITIZED or found.tool not in TOOLS:
            known = f"{SANITIZED} of one of {', '.join(TOOLS)}"
            yield f"a sanitizer's report: expected {known}, got {found.schema!r} of {found.tool!r}"
        stated = {"backend": found.backend, "suite": found.suite, **found.versions}
        expected = {"backend": certificate.backend, "suite": certificate.suite, **certificate.pins.versions}
        for name in sorted(stated.keys() & expected.keys()):
            if stated[name] != expected[name]:
                yield f"the report of {found.tool} is of {name} {stated[name]}, the record of {expected[name]}"
