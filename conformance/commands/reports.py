"""The commands on reports, which take no torch, and those that judge the judge: by known kernels, and by cheats."""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from mla_conformance.engine.machine import machine_cores
from mla_conformance.expectations import KNOWN_FAILURES, Expectation, Expectations, read_expectations, to_toml
from mla_conformance.files import whole
from mla_conformance.gating.gate import Gate, gate_lines
from mla_conformance.gating.mustpass import SHIPPED, MustPass, Required
from mla_conformance.judging import traits
from mla_conformance.judging.record import Status
from mla_conformance.report import causes, differences, outcome, summary
from mla_conformance.report.ci_views import annotations, junit, markdown
from mla_conformance.report.html import html
from mla_conformance.report.json_report import load_report, merge_shards, report_file, report_form, schema, to_text
from mla_conformance.report.terminal import columns, counted, put, say, shown_line
from mla_conformance.vocabulary.capabilities import Tier

_INCOMPLETE = 3
Format = Callable[[summary.RunSummary], str]
FORMATS: dict[str, Format] = {"html": html, "markdown": markdown, "annotations": annotations, "junit": junit}
FORMATS["text"] = lambda run: "".join(
    f"{shown_line(line)}\n" for line in [*outcome.outcome_lines(run, columns()), outcome.closing_line(run)]
)


def render(options: argparse.Namespace) -> int:
    write_or_print(options.out, FORMATS[options.format](load_report(options.report)))
    return 0


def write_or_print(path: Path | None, text: str) -> None:
    if path:
        whole.write_output(path, text)
    else:
        put(text.rstrip("\n"))


def diff(options: argparse.Namespace) -> int:
    before, after = load_report(options.before), load_report(options.after)
    if said := differences.suites_differ(before, after):
        say(said)
    changes = differences.compare(before, after, options.drift)
    regressions = sum(change.regression for change in changes)
    closing = f"{counted(regressions, 'regression')}, {counted(len(changes) - regressions, 'other change')}"
    say(*differences.change_lines(changes), closing)
    return 1 if regressions else 0


def merge(options: argparse.Namespace) -> int:
    merged = merge_shards([load_report(path) for path in options.shards])
    whole.write_output(options.out, to_text(report_form(merged)))
    say(outcome.closing_line(merged))
    return _INCOMPLETE if merged.counts.not_run else 0


def print_schema(options: argparse.Namespace) -> int:
    put(json.dumps(schema(), indent=1))
    return 0


def gate(options: argparse.Namespace) -> int:
    present = [path for path in options.reports if report_file(path).exists()]
    known = list(map(load_report, present)), Expectations.load([KNOWN_FAILURES, *options.expectations])
    absent = [str(path) for path in options.reports if path not in present]
    required = list(map(Required.asked, options.require))
    tier = None if options.require_tier == "none" else Tier(options.require_tier)
    baseline = list(map(load_report, options.baseline))
    must_pass = None if options.must_pass is None else MustPass.asked(options.must_pass or [SHIPPED])
    bits, limit, suites = list(map(traits.Question, options.require_bitwise)), options.max_drift, options.allow_suite
    found = Gate(*known, absent, required, tier, baseline, must_pass, limit, suites, bits)
    rows = found.rows()
    blocked = any(map(found.blocks, rows))
    say(*gate_lines(found, rows, blocked))
    return 1 if blocked else 0


def update_expectations(options: argparse.Namespace) -> int:
    kept, added, removed = plan_update(load_report(options.report), options.dir)
    texts = causes.grouped((*kept, *added), lambda entry: entry.file)
    try:
        options.dir.mkdir(parents=True, exist_ok=True)
        for name in sorted({entry.file for entry in (*added, *removed)}):
            if name in texts:
                whole.write_whole(Path(name), "\n".join(map(to_toml, texts[name])))
            else:
                Path(name).unlink()
    except OSError as error:
        raise whole.InputError(f"{options.dir}: cannot be written: {error.strerror}") from error
    for sign, entries in (("+", added), ("-", removed)):
        for entry in entries:
            for text in entry.texts:
                say(f"{sign} {entry.backend} {text} {entry.status} {entry.check}".rstrip())
    say(f"{len(added)} added, {len(removed)} removed, {len(kept)} kept in {options.dir}")
    without = sum(not whole.has_letters(entry.reason) for entry in (*kept, *added))
    if without:
        say(f"entries without a reason: {without}; the gate refuses them until a person has written one")
    return 0


def plan_update(report: summary.RunSummary, folder: Path) -> tuple[list[Expectation], ...]:
    """Entries that still hold or of which nothing was run, new ones without a reason, and what no longer fails so."""
    paths = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    existing = [entry for path in paths for entry in read_expectations(path, reasons_required=False)]
    known_of = {backend.name: {**backend.facts.versions, **report.environment} for backend in report.backends}
    run = [(record.as_judged, known_of[record.backend]) for record in report.records]
    kept, removed = list[Expectation](), list[Expectation]()
    for entry in existing:
        holding = {}  # whether something that it covers fails as it says, or might have, or nothing of it was run
        for text in entry.texts:
            one = replace(entry, case=text)
            covered = [record for record, known in run if one.covers(record, known)]
            holding[text] = not covered or one.sometimes or any(map(one.foresees, covered))
        for into, holds in ((kept, True), (removed, False)):
            if texts := tuple(text for text in holding if holding[text] is holds):
                into.append(replace(entry, case=texts if texts[1:] else texts[0]))
    failing = [(each, known) for each, known in run if each.failed and each.status is not Status.HARNESS_ERROR]
    new = [record for record, known in failing if not any(e.covers(record, known) and e.foresees(record) for e in kept)]
    ways = causes.grouped(new, lambda record: (record.backend, record.status, record.check)).values()
    added = []
    for first, *others in ways:  # one reason for what a backend fails in one way, unless a person splits it
        cases = (first.case, *(each.case for each in others)) if others else first.case
        name, status = str(folder / f"{first.backend.replace('[', '-').rstrip(']')}.toml"), first.status.value
        added.append(Expectation(backend=first.backend, case=cases, status=status, check=first.check, file=name))
    return kept, added, removed


def list_must_pass(options: argparse.Namespace) -> int:
    put(MustPass.of_vocabulary().to_text().rstrip("\n"))
    return 0


def run_defects(options: argparse.Namespace) -> int:
    from mla_conformance.defects.report import deciding_digest, run_matrix, summarise, terminal_lines
    from mla_conformance.defects.report import markdown as markdown_of

    tier = Tier(options.tier)
    if options.page:
        whole.section_of(options.page, "defects")  # it is there before anything is run
    if options.out:
        whole.require_writable(options.out)
    digest = deciding_digest()  # of what the run begins with; files may change while it lasts
    report = summarise(run_matrix(tier, machine_cores()), tier.value, digest)
    if options.out:
        whole.write_output(options.out, to_text(report))
    if options.page:
        whole.write_section(options.page, "defects", markdown_of(report))
    say(*terminal_lines(report))
    return 0 if report.holds else 1


def try_cheats(options: argparse.Namespace) -> int:
    """Certify kernels that cheat as a user would, say and write what catches them; 1 if one fares otherwise."""
    if not (files("mla_conformance") / "tests").is_dir():
        why = "needs a checkout, since no wheel holds the tests; clone the project and: pip install -e ."
        raise whole.InputError(f"cheats: {why}")
    if options.out:
        whole.require_writable(options.out)
    from mla_conformance.tests.cheats import report

    return report.try_cheats(options)
