"""Executing some cases of a certificate again."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mla_conformance.certificate.certificate import Certificate
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.request import Request, RequestError
from mla_conformance.engine.run import Limits, Run
from mla_conformance.engine.supervisor import RunError
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.backend_facts import BackendFacts
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status

_JUDGED = (Status.PASS, Status.EXPECTED_FAILURE)


def rerun(certificate: Certificate, number: int, reference: str | None, device: str | None) -> Iterator[str]:
    """Run ``number`` random ones of the cases that were judged and say what differs from the certificate.

    Raises:
        InputError: the backend cannot be run here, or is another one.
    """
    judged = judged_cases(certificate)
    cases = random.SystemRandom().sample(judged, min(number, len(judged)))
    try:
        request = Request.of([reference or certificate.backend], device=device, cases=cases)
        found = {record.case: record for record in _records(certificate, request)}
    except (RequestError, RunError) as error:
        raise InputError(f"cannot run the cases again: {error}") from error
    for case in cases:
        stated, record = certificate.cases[case], found.get(case)
        if record is None or not _agrees(stated, record):
            now = f"{record.status}: {record.message}" if record else "no verdict"
            yield f"case {case}: the certificate says {stated}, run again it gives {now}"


def judged_cases(certificate: Certificate) -> list[str]:
    """The cases that the kernel was held to, whether it passed or is known to fail."""
    return sorted(case for case, status in certificate.cases.items() if status in _JUDGED)


def _agrees(stated: Status, record: Record) -> bool:
    return record.as_judged.failed if stated is Status.EXPECTED_FAILURE else record.status is stated


def _records(certificate: Certificate, request: Request) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="mla-conformance-verify-") as folder:
        with Run(request, RunFolder.claim(Path(folder)), Limits(workers=1)) as run:
            run.prepare()
            _require_runnable(certificate, run.facts)
            run.begin()
            run.judge(lambda record: None)
        return run.summary().records


def _require_runnable(certificate: Certificate, facts: Sequence[BackendFacts]) -> None:
    (backend,) = facts
    if backend.name != certificate.backend:
        raise InputError(f"the certificate is of {certificate.backend}, not of {backend.name}")
    if backend.reasons:
        raise InputError(f"cannot run the cases again: {'; '.join(backend.reasons)}")
