"""Executing some cases of a certificate again."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mla_conformance.certificate.certificate import Certificate
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import RunSummary
from mla_conformance.running.certify import Run, RunError
from mla_conformance.running.selection import Selection, SelectionError


def rerun(certificate: Certificate, number: int, reference: str | None, device: str | None) -> Iterator[str]:
    """Run ``number`` random cases and say what differs from the certificate.

    Raises:
        InputError: the backend cannot be run here, or is another one.
    """
    cases = random.SystemRandom().sample(sorted(certificate.cases), min(number, len(certificate.cases)))
    try:
        selection = Selection.of([reference or certificate.backend], (), "full", device, cases)
        _require_runnable(certificate, selection)
        found = {record.case: record for record in _run(selection).records}
    except (SelectionError, RunError) as error:
        raise InputError(f"cannot run the cases again: {error}") from error
    for case in cases:
        stated, record = certificate.cases[case], found.get(case)
        if record is None or not _agrees(stated, record):
            now = f"{record.status}: {record.message}" if record else "no verdict"
            yield f"case {case}: the certificate says {stated}, run again it gives {now}"


def _require_runnable(certificate: Certificate, selection: Selection) -> None:
    (subject,) = selection.subjects
    if subject.name != certificate.backend:
        raise InputError(f"the certificate is of {certificate.backend}, not of {subject.name}")
    if subject.unavailable:
        raise InputError(f"cannot run the cases again: {'; '.join(subject.unavailable)}")


def _agrees(stated: Status, record: Record) -> bool:
    return record.as_judged.failed if stated is Status.EXPECTED_FAILURE else record.status is stated


def _run(selection: Selection) -> RunSummary:
    with tempfile.TemporaryDirectory(prefix="mla-conformance-verify-") as folder:
        run = Run(selection, Path(folder), workers=1)
        run.execute(lambda record: None)
        return run.summary()
