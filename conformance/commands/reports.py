"""The commands on reports, which take no torch, and those that judge the judge: by known kernels, and by cheats."""

import argparse
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from mla_conformance.engine.machine import machine_cores
from mla_conformance.expectations.apply import KNOWN_FAILURES, Expectations, plan_update
from mla_conformance.files.whole import InputError, Section, has_letters, require_writable, write_output
from mla_conformance.gating.gate import Gate, gate_lines
from mla_conformance.gating.mustpass import SHIPPED, MustPass, Required
from mla_conformance.judging.traits import Question
from mla_conformance.report.ci_views import annotations, junit, markdown
from mla_conformance.report.differences import change_lines, compare, suites_differ
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report, merge_shards, report_file, report_form, schema, to_text
from mla_conformance.report.outcome import closing_line, outcome_lines
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import columns, counted, put, say, shown_line
from mla_conformance.vocabulary.capabilities import Tier

_INCOMPLETE = 3
FORMATS: dict[str, Callable[[RunSummary], str]] = {
    "html": html,
    "markdown": markdown,
    "annotations": annotations,
    "junit": junit,
    "text": lambda run: "".join(
        f"{shown_line(line)}\n" for line in [*outcome_lines(run, columns()), closing_line(run)]
    ),
}


def render(options: argparse.Namespace) -> int:
    write_or_print(options.out, FORMATS[options.format](load_report(options.report)))
    return 0


def write_or_print(path: Path | None, text: str) -> None:
    if path:
        write_output(path, text)
    else:
        put(text.rstrip("\n"))


def diff(options: argparse.Namespace) -> int:
    before, after = load_report(options.before), load_report(options.after)
    if said := suites_differ(before, after):
        say(said)
    changes = compare(before, after, options.drift)
    regressions = sum(change.regression for change in changes)
    closing = f"{counted(regressions, 'regression')}, {counted(len(changes) - regressions, 'other change')}"
    say(*change_lines(changes), closing)
    return 1 if regressions else 0


def merge(options: argparse.Namespace) -> int:
    merged = merge_shards([load_report(path) for path in options.shards])
    write_output(options.out, to_text(report_form(merged)))
    say(closing_line(merged))
    return _INCOMPLETE if merged.counts.not_run else 0


def print_schema(options: argparse.Namespace) -> int:
    put(json.dumps(schema(), indent=1))
    return 0


def gate(options: argparse.Namespace) -> int:
    present = [path for path in options.reports if report_file(path).exists()]
    found = Gate(
        reports=[load_report(path) for path in present],
        expectations=Expectations.load([KNOWN_FAILURES, *options.expectations]),
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
    say(*gate_lines(found, rows, blocked))
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


def run_defects(options: argparse.Namespace) -> int:
    from mla_conformance.defects.report import deciding_digest, run_matrix, summarise, terminal_lines
    from mla_conformance.defects.report import markdown as section_of

    tier = Tier(options.tier)
    page = Section.of(options.page, "defects") if options.page else None  # known before anything is run
    if options.out:
        require_writable(options.out)
    digest = deciding_digest()  # of what the run begins with; files may change while it lasts
    report = summarise(run_matrix(tier, machine_cores()), tier.value, digest)
    if options.out:
        write_output(options.out, to_text(report))
    if page:
        page.write(section_of(report))
    say(*terminal_lines(report))
    return 0 if report.holds else 1


def try_cheats(options: argparse.Namespace) -> int:
    """Certify kernels that cheat as a user would, say and write what catches them; 1 if one fares otherwise."""
    if not (files("mla_conformance") / "tests").is_dir():
        why = "needs a checkout, since no wheel holds the tests; clone the project and: pip install -e ."
        raise InputError(f"cheats: {why}")
    if options.out:
        require_writable(options.out)
    from mla_conformance.tests.cheats import report

    return report.try_cheats(options)
