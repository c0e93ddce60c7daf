"""Reasons of a record's failures, which are often found after the run; its verdicts stay as they are."""

import datetime
from collections.abc import Mapping

import msgspec

from mla_conformance.certificate.certificate import Certificate, Finding
from mla_conformance.certificate.digests import seal
from mla_conformance.certificate.verify import problems
from mla_conformance.expectations.apply import Expectations, facts
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status


def with_reasons(certificate: Certificate, expectations: Expectations, today: datetime.date) -> Certificate:
    """The same record, each failure of which says what these expectations say of it."""
    if wrong := problems(certificate, today):
        raise InputError(f"{certificate.backend}: expected a record that verifies; {wrong[0]}")
    known = facts(certificate.environment, certificate.pins.versions)
    findings = tuple(_explained(finding, certificate, expectations, known) for finding in certificate.findings)
    changed = msgspec.structs.replace(certificate, findings=findings)
    return msgspec.structs.replace(changed, seal=seal(changed))


def _explained(
    finding: Finding, certificate: Certificate, expectations: Expectations, known: Mapping[str, str]
) -> Finding:
    capability = finding.case.partition(":")[0]
    failed = Record(certificate.backend, certificate.reference, capability, finding.case, finding.status or Status.FAIL)
    seen = expectations.apply(failed.with_fields(check=finding.check, message=finding.message), known)
    if seen.status is not Status.EXPECTED_FAILURE:
        raise InputError(
            f"{certificate.backend}: expected an entry for {finding.status} of {finding.case}, got none; "
            "write it into a folder of --expectations"
        )
    return msgspec.structs.replace(finding, expectation=seen.expectation)
