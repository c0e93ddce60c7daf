"""Executing some cases of a certificate again, on inputs that its author could not know."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mla_conformance.backends.references import BackendReference
from mla_conformance.certificate.certificate import Certificate
from mla_conformance.certificate.pins import Remark, Weight, compare_loaded, compare_machines
from mla_conformance.engine.folder import RunFolder
from mla_conformance.engine.request import RequestError, RunRequest
from mla_conformance.engine.run import Run
from mla_conformance.engine.supervisor import Limits, RunError
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.differences import contradicts
from mla_conformance.report.summary import RunSummary

_JUDGED = (Status.PASS, Status.EXPECTED_FAILURE)


def rerun(
    certificate: Certificate, number: int, backend: BackendReference, device: str | None, salt: str
) -> Iterator[Remark]:
    """Run ``number`` random ones of the cases that were judged, and say what differs from the certificate."""
    judged = judged_cases(certificate)
    cases = random.SystemRandom().sample(judged, min(number, len(judged)))
    try:
        request = RunRequest.of([backend.reference], device=device, cases=cases, salt=salt)
        summary = _run(request)
    except (RequestError, RunError) as error:
        raise InputError(f"cannot run the cases again: {error}") from error
    yield from compare_machines(certificate.environment, summary.environment)
    yield from compare_loaded(certificate.traced, summary.backends[0].traced)
    found = {record.case: record for record in summary.records}
    for case in cases:
        yield from _difference(case, certificate.cases[case], found.get(case), salt == certificate.salt)


def judged_cases(certificate: Certificate) -> list[str]:
    """The cases that the kernel was held to, whether it passed or is known to fail."""
    return sorted(case for case, status in certificate.cases.items() if status in _JUDGED)


def _difference(case: str, stated: Status, record: Record | None, same_inputs: bool) -> Iterator[Remark]:
    said = f"case {case}: the certificate says {stated}, run again it gives"
    if record is None:
        yield Remark(Weight.AGAINST, f"{said} no verdict")
        return
    now = f"{record.status}: {record.message}; {record.replay}" if record.failed else record.status.value
    if contradicts(stated, record.status):
        # A known failure may need its own inputs to show.
        excused = stated is Status.EXPECTED_FAILURE and not same_inputs
        yield Remark(Weight.REPORTED if excused else Weight.AGAINST, f"{said} {now}")
    elif record.status is Status.UNAVAILABLE:  # another device's memory is nothing against a kernel
        yield Remark(Weight.REPORTED, f"{said} {now}")


def _run(request: RunRequest) -> RunSummary:
    with tempfile.TemporaryDirectory(prefix="mla-conformance-verify-") as folder:
        with Run(request, RunFolder.claim(Path(folder)), Limits(workers=1)) as run:
            run.prepare()
            if reasons := run.facts[0].reasons:
                raise InputError(f"cannot run the cases again: {'; '.join(reasons)}")
            run.begin()
            run.judge()
            run.finish()
        return run.summary()
