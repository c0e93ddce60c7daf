"""``verify``: a certificate against the suite that is installed, and against some of its cases run again."""

import argparse
import datetime

from mla_conformance.certificate.certificate import read_certificate
from mla_conformance.certificate.rerun import rerun
from mla_conformance.certificate.verify import problems
from mla_conformance.report.terminal import say


def verify(options: argparse.Namespace) -> int:
    """Check a certificate; the exit status."""
    certificate = read_certificate(options.certificate)
    found = problems(certificate, datetime.date.today())
    if not found and options.rerun > 0:
        found = list(rerun(certificate, options.rerun, options.backend, options.device))
    for problem in found:
        say(f"{options.certificate}: {problem}", error=True)
    if found:
        return 1
    counts, again = certificate.counts, f" · {options.rerun} run again" if options.rerun > 0 else ""
    dirty = "" if certificate.clean_tree is not False else " · from a changed checkout"
    subject = f"{certificate.backend} on {certificate.device}, suite {certificate.suite}"
    say(f"{options.certificate}: {subject}: {counts.passed} of {counts.listed} passed · holds{again}{dirty}")
    return 0
