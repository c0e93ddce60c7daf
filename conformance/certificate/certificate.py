"""What a certificate holds, as a value and as a file, and what of a record of an earlier form can still be shown."""

import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from mla_conformance.backends.references import BackendReferenceError, parse_reference
from mla_conformance.certificate.pins import Pins
from mla_conformance.files.inputs import InputError, decode, read_text
from mla_conformance.judging.record import Record, Traced
from mla_conformance.judging.traits import NO_TRAITS, Traits
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import DeviationForm
from mla_conformance.report.summary import Counts
from mla_conformance.speed.times import Speed
from mla_conformance.version import SUITE_VERSION

RECORDS = f"fixtures/records/{SUITE_VERSION}.jsonl"
"""The file of this suite's records, in a checkout."""
_NAME, _VERSION = "mla-conformance-certificate", 6
SCHEMA = f"{_NAME}/{_VERSION}"

Text = Annotated[str, Meta(min_length=1)]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure that an expectation waives; what it looks like is missing in records that were made before that was."""

    case: str
    status: Status | None
    check: str
    message: str
    expectation: str
    explanation: str | UnsetType = UNSET


class Unjudged(Struct, frozen=True, forbid_unknown_fields=True):
    case: str
    reason: str


class Worst(Struct, frozen=True, forbid_unknown_fields=True):
    """The largest share of its error budget that a passed case used, and the case."""

    share: Annotated[float, Meta(ge=0, le=1)]
    case: str


class Certificate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a complete run of one real kernel found: its record, and a certificate if no must-pass case is lacking."""

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
    deviations: tuple[DeviationForm, ...]
    evidence: tuple[dict[str, str], ...]
    traced: Traced
    digests: dict[str, str]
    counts: Counts
    worst: dict[str, Worst]
    seconds: Annotated[float, Meta(ge=0)]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, Status]
    traits: Traits | UnsetType = UNSET
    speed: Speed | UnsetType = UNSET
    seal: str = ""

    @property
    def is_current(self) -> bool:
        return self.suite == SUITE_VERSION

    @property
    def salt(self) -> str:
        return self.environment.get("salt", "")

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def renewal(reference: str, device: str) -> str:
    """The command that certifies a backend anew on a device of this kind."""
    kind = "cpu" if device == "cpu" else "cuda"
    return f"mla-conformance certify --backend {shlex.quote(reference)} --device {kind} --submission {RECORDS}"


class Outdated(Exception):
    """A certificate that an earlier suite wrote in a form of its own; the message says how to renew it."""


class _Head(Struct):
    schema: str = ""
    suite: str = ""
    reference: str = ""
    device: str = ""


def read_certificate(path: Path) -> Certificate:
    """The certificate of a file; Outdated if it is of an earlier form."""
    text = read_text(path)
    head = decode(text, _Head, str(path))
    name, _, version = head.schema.partition("/")
    if name == _NAME and version in map(str, range(1, _VERSION)):
        raise Outdated(
            f"of suite {head.suite}, whose form {head.schema} pins too little to be verified; renew it: "
            f"{renewal(head.reference, head.device)}"
        )
    if head.schema != SCHEMA:
        raise InputError(f"{path}: expected a certificate of schema {SCHEMA}, got {head.schema!r}")
    return decode(text, Certificate, str(path))


def records_of(backend: str, reference: str, cases: Mapping[str, Status]) -> list[Record]:
    return [Record(backend, reference, case.partition(":")[0], case, status) for case, status in cases.items()]


class _Pins(Struct, frozen=True):
    versions: dict[str, str] = {}


class Shown(Struct, frozen=True, kw_only=True):
    """A record of any form from which its cases, their reasons and its figures can be read.

    One of an earlier form cannot be verified any more.
    """

    suite: str
    date: str
    backend: str
    reference: str
    device: str
    environment: dict[str, str]
    rounding: dict[str, str]
    counts: Counts
    worst: dict[str, Worst]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, Status]
    versions: dict[str, str] = {}
    pins: _Pins = _Pins()
    traits: Traits = NO_TRAITS

    @property
    def distributions(self) -> dict[str, str]:
        """Version of each distribution behind the backend; of one that is not registered, of all that it loaded."""
        found = {name: self.pins.versions[name] for name in _declared(self.reference) if name in self.pins.versions}
        return self.versions or found or dict(self.pins.versions)

    @property
    def worst_share(self) -> float:
        """The largest share of its error budget that a passed case used; 0 without one."""
        return max((entry.share for entry in self.worst.values()), default=0.0)


@cache
def _declared(reference: str) -> tuple[str, ...]:
    """What the adapters of a registered backend declare; nothing of any other, whose code a record must not run."""
    from mla_conformance.backends.declaration import declaration_of  # torch, which a list of commands does without
    from mla_conformance.backends.loading import load_role, roles_of

    try:
        backend = parse_reference(reference)
        if not backend.members():
            return ()
        declared = [declaration_of(load_role(backend, role)).distributions for role in roles_of(backend)]
    except (BackendReferenceError, ImportError):
        return ()
    return tuple(dict.fromkeys(name for names in declared for name in names))


def shown_of(certificate: Certificate) -> Shown:
    return msgspec.convert(certificate.to_json(), Shown)


def read_shown(path: Path) -> Shown:
    return decode(read_text(path), Shown, str(path))
