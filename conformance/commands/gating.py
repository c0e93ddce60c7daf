"""The commands that decide by a run's report, which takes no torch."""

import argparse
from pathlib import Path

from mla_conformance.commands.options import SHIPPED
from mla_conformance.expectations.apply import Expectations, shipped
from mla_conformance.expectations.update import plan_update
from mla_conformance.gating.gate import Gate
from mla_conformance.gating.gate_table import gate_lines
from mla_conformance.gating.mustpass import MustPass
from mla_conformance.report.loading import load_report
from mla_conformance.report.terminal import put, say


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
            for text in entry.texts:
                say(f"{sign} {entry.backend} {text} {entry.status} {entry.check}".rstrip())
    say(f"{len(update.added)} added, {len(update.removed)} removed, {len(update.kept)} kept in {options.dir}")
    without = sum(not entry.reason.strip() for entry in (*update.kept, *update.added))
    if without:
        say(f"{without} entries need a reason; the gate refuses them until they have one")
    return 0


def tell_must_pass() -> int:
    """Print the must-pass list; the exit status."""
    put(MustPass.of_vocabulary().to_text().rstrip("\n"))
    return 0
