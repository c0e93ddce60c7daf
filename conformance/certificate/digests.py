"""Digests that tie a certificate to the cases, the judge and the reference that it was issued by."""

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from mla_conformance.certificate.certificate import Certificate
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.judging.sources import judging_sources
from mla_conformance.vocabulary.capabilities import CAPABILITIES


def installed_digests() -> dict[str, str]:
    """Digests of what is installed here, by what they are of."""
    return {
        "cases": cases_digest(),
        "judging": judging_digest(),
        "reference": reference_digest(),
        "must_pass": must_pass_digest(),
    }


def version_digests() -> dict[str, str]:
    """What one version of the suite stands for: another one of these is another version."""
    told = {name: digest for name, digest in installed_digests().items() if name != "must_pass"}  # it has a history
    return {**told, "spec": spec_digest()}


@cache
def cases_digest() -> str:
    """SHA-256 of the list of cases."""
    return meaning_digest((), "\n".join(case.digest + case.id for e in CAPABILITIES.values() for case in e.cases))


@cache
def judging_digest() -> str:
    """SHA-256 of the tolerance table and the sources of judge and procedures."""
    return meaning_digest(judging_sources())


@cache
def spec_digest() -> str:
    """SHA-256 of the words of SPEC.md."""
    return meaning_digest((), *(files("mla_conformance") / "SPEC.md").read_text(encoding="utf-8").split())


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
