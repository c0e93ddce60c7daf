"""What a certificate holds, as a value and as a file."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mla_conformance.files.inputs import InputError, decode, read_text
from mla_conformance.judging.traced import Traced
from mla_conformance.judging.verdict import Status
from mla_conformance.report.counts import Counts
from mla_conformance.report.form import DeviationForm

SCHEMA = "mla-conformance-certificate/5"

Text = Annotated[str, Meta(min_length=1)]


class Finding(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure that an expectation waives."""

    case: str
    status: Status | None
    check: str
    message: str
    expectation: str


class Unjudged(Struct, frozen=True, forbid_unknown_fields=True):
    """A case that could not be judged on the device."""

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
    versions: dict[str, str]
    rounding: dict[str, str]
    deviations: tuple[DeviationForm, ...]
    evidence: tuple[dict[str, str], ...]
    traced: Traced
    clean_tree: bool | None
    digests: dict[str, str]
    counts: Counts
    worst: dict[str, Worst]
    seconds: Annotated[float, Meta(ge=0)]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, Status]
    seal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class _Head(Struct):
    schema: str = ""


def read_certificate(path: Path) -> Certificate:
    """The certificate of a file.

    Raises:
        InputError: it cannot be read or is no certificate of this form.
    """
    text = read_text(path)
    found = decode(text, _Head, str(path)).schema
    if found != SCHEMA:
        raise InputError(f"{path}: expected a certificate of schema {SCHEMA}, got {found!r}")
    return decode(text, Certificate, str(path))
