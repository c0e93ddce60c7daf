"""Digests that tie a certificate to the cases, the judge and the reference that it was issued by."""

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.sources import judging_sources


def installed_digests() -> dict[str, str]:
    """Digests of what is installed here, by what they are of."""
    return {"suite": suite_digest(), "reference": reference_digest(), "must_pass": must_pass_digest()}


@cache
def suite_digest() -> str:
    """SHA-256 of the case list, the tolerance table and the sources of judge and procedures."""
    cases = (case.digest + case.id for entry in CAPABILITIES.values() for case in entry.cases)
    return meaning_digest(judging_sources(), "\n".join(cases))


@cache
def reference_digest() -> str:
    """SHA-256 of the sources of the golden mathematics."""
    return meaning_digest(Path(str(files("mla_conformance.reference"))).glob("*.py"))


@cache
def must_pass_digest() -> str:
    """SHA-256 of this suite version's must-pass list."""
    return MustPass.of_vocabulary().digest


def seal(certificate: Certificate) -> str:
    """SHA-256 of a certificate's content, which notices a change by accident or by hand."""
    content = msgspec.json.encode(msgspec.structs.replace(certificate, seal=""), order="deterministic")
    return hashlib.sha256(content).hexdigest()
