"""``verify``: certificates against the suite that is installed, and against some of their cases run again."""

import argparse
import datetime
from pathlib import Path

from mla_conformance.certificate.certificate import read_certificate
from mla_conformance.certificate.rerun import judged_cases, rerun
from mla_conformance.certificate.verify import problems
from mla_conformance.report.terminal import say


def verify(options: argparse.Namespace) -> int:
    """Check certificates; the exit status."""
    return max([_verify(path, options) for path in options.certificates])


def _verify(path: Path, options: argparse.Namespace) -> int:
    certificate = read_certificate(path)
    found = problems(certificate, datetime.date.today())
    if not found and options.rerun > 0:
        found = list(rerun(certificate, options.rerun, options.backend, options.device))
    for problem in found:
        say(f"{path}: {problem}", error=True)
    if found:
        return 1
    counts, number = certificate.counts, min(options.rerun, len(judged_cases(certificate)))
    again = f" · {number} run again" if number > 0 else ""
    dirty = "" if certificate.clean_tree is not False else " · from a changed checkout"
    subject = f"{certificate.backend} on {certificate.device}, suite {certificate.suite}"
    waived = f", {counts.waived} known to fail" if counts.waived else ""
    lacking = f" · no certificate, {len(certificate.lacking)} must-pass cases lack" if certificate.lacking else ""
    say(f"{path}: {subject}: {counts.passed} of {counts.listed} passed{waived} · holds{again}{dirty}{lacking}")
    return 0
