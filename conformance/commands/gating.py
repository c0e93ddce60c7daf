"""The commands that decide by a run's report, which takes no torch."""

import argparse

from mla_conformance.expectations.apply import Expectations, plan_update, shipped
from mla_conformance.files.inputs import has_letters
from mla_conformance.gating.gate import Gate, gate_lines
from mla_conformance.gating.mustpass import SHIPPED, MustPass, Required
from mla_conformance.judging.traits import Question
from mla_conformance.report.loading import load_report, report_file
from mla_conformance.report.terminal import put, say
from mla_conformance.vocabulary.capabilities import Tier


def gate(options: argparse.Namespace) -> int:
    present = [path for path in options.reports if report_file(path).exists()]
    found = Gate(
        reports=[load_report(path) for path in present],
        expectations=Expectations.load([shipped(), *options.expectations]),
        absent=[str(path) for path in options.reports if path not in present],
        required=[Required.asked(text) for text in options.require],
        tier=None if options.require_tier == "none" else Tier(options.require_tier),
        baseline=[load_report(path) for path in options.baseline],
        must_pass=None if options.must_pass is None else MustPass.asked(options.must_pass or [SHIPPED]),
        max_drift=options.max_drift,
        suites=options.allow_suite,
        bitwise=[Question(name) for name in options.require_bitwise],
    )
    rows = found.rows()
    blocked = any(map(found.blocks, rows))
    for line in gate_lines(found, rows, blocked):
        say(line)
    return 1 if blocked else 0


def update_expectations(options: argparse.Namespace) -> int:
    update = plan_update(load_report(options.report), options.dir)
    update.write(options.dir)
    for sign, entries in (("+", update.added), ("-", update.removed)):
        for entry in entries:
            for text in entry.texts:
                say(f"{sign} {entry.backend} {text} {entry.status} {entry.check}".rstrip())
    say(f"{len(update.added)} added, {len(update.removed)} removed, {len(update.kept)} kept in {options.dir}")
    without = sum(not has_letters(entry.reason) for entry in (*update.kept, *update.added))
    if without:
        say(f"entries without a reason: {without}; the gate refuses them until a person has written one")
    return 0


def list_must_pass(options: argparse.Namespace) -> int:
    put(MustPass.of_vocabulary().to_text().rstrip("\n"))
    return 0
