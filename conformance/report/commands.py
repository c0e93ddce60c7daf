"""The commands on reports. Exit status: 0 in order, 1 regressions, 2 bad input, 3 an incomplete run."""

import argparse
import json
from collections.abc import Callable

from mla_conformance.files.outputs import write_output
from mla_conformance.report.ci_views import annotations, junit, markdown
from mla_conformance.report.differences import compare, suites_differ
from mla_conformance.report.html import html
from mla_conformance.report.json_report import report_json, schema, to_text
from mla_conformance.report.loading import load_report, merge_shards
from mla_conformance.report.outcome import closing_line, outcome_lines
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import columns, counted, put, say, shown_line

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
    text = FORMATS[options.format](load_report(options.report))
    if options.out:
        write_output(options.out, text)
    else:
        put(text.rstrip("\n"))
    return 0


def diff(options: argparse.Namespace) -> int:
    before, after = load_report(options.before), load_report(options.after)
    if said := suites_differ(before, after):
        say(said)
    changes = compare(before, after, options.drift)
    for change in changes:
        say(change.line)
    regressions = sum(change.regression for change in changes)
    say(f"{counted(regressions, 'regression')}, {counted(len(changes) - regressions, 'other change')}")
    return 1 if regressions else 0


def merge(options: argparse.Namespace) -> int:
    merged = merge_shards([load_report(path) for path in options.shards])
    write_output(options.out, to_text(report_json(merged)))
    say(closing_line(merged))
    return _INCOMPLETE if merged.counts.not_run else 0


def print_schema(options: argparse.Namespace) -> int:
    put(json.dumps(schema(), indent=1))
    return 0
