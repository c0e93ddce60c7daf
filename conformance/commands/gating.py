"""The commands that decide by a run's outcome."""

import argparse
import datetime
from pathlib import Path

from mla_conformance.certificate.certificate import read_certificate
from mla_conformance.certificate.rerun import rerun
from mla_conformance.certificate.verify import problems
from mla_conformance.commands.options import SHIPPED
from mla_conformance.expectations.apply import Expectations, shipped
from mla_conformance.expectations.update import plan_update
from mla_conformance.gating.gate import Gate
from mla_conformance.gating.gate_table import gate_lines
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.report.loading import load_report
from mla_conformance.report.terminal import say


def gate(options: argparse.Namespace) -> int:
    """Print what the gate finds; the exit status."""
    must_pass = None
    if options.must_pass:
        must_pass = MustPass.of_suite() if options.must_pass == SHIPPED else MustPass.read(Path(options.must_pass))
    found = Gate(
        reports=[load_report(path) for path in options.reports],
        expectations=Expectations.load([shipped(), *options.expectations]),
        baseline=[load_report(path) for path in options.baseline],
        must_pass=must_pass,
        max_drift=options.max_drift,
    )
    rows = found.rows()
    blocked = any(map(found.blocks, rows))
    for line in gate_lines(rows, blocked, sum(len(report.records) for report in found.reports)):
        say(line)
    return 1 if blocked else 0


def update_expectations(options: argparse.Namespace) -> int:
    """Rewrite a folder of expectations; the exit status."""
    update = plan_update(load_report(options.report), options.dir)
    update.write(options.dir)
    for sign, entries in (("+", update.added), ("-", update.removed)):
        for entry in entries:
            say(f"{sign} {entry.backend} {entry.case} {entry.status} {entry.check}".rstrip())
    say(f"{len(update.added)} added, {len(update.removed)} removed, {len(update.kept)} kept in {options.dir}")
    without = sum(not entry.reason.strip() for entry in (*update.kept, *update.added))
    if without:
        say(f"{without} entries need a reason; the gate refuses them until they have one")
    return 0


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


def tell_must_pass() -> int:
    """Print the must-pass list; the exit status."""
    say(MustPass.of_vocabulary().to_text().rstrip("\n"))
    return 0
