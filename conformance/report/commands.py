"""The commands on reports. Exit status: 0 in order, 1 regressions, 2 bad input, 3 an incomplete run."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from mla_conformance.files.outputs import write_output
from mla_conformance.report.answer import closing_line
from mla_conformance.report.ci_views import annotations, junit, markdown
from mla_conformance.report.compare import DRIFT, compare, suites_differ
from mla_conformance.report.form import schema
from mla_conformance.report.html import html
from mla_conformance.report.json_report import report_json, to_text
from mla_conformance.report.loading import load_report, merge_shards
from mla_conformance.report.outcome import outcome_lines
from mla_conformance.report.shown import shown_line
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import columns, counted, put, say

_INCOMPLETE = 3


def _text(run: RunSummary) -> str:
    return "".join(f"{shown_line(line)}\n" for line in [*outcome_lines(run, columns()), closing_line(run)])


FORMATS: dict[str, Callable[[RunSummary], str]] = {
    "html": html,
    "markdown": markdown,
    "annotations": annotations,
    "junit": junit,
    "text": _text,
}


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``report`` with its own commands."""
    report = commands.add_parser("report", help="show, compare and merge report.json files")
    kinds = report.add_subparsers(required=True)
    render = kinds.add_parser("render", help="a report for people")
    render.add_argument("report", type=Path, metavar="REPORT")
    render.add_argument("--format", choices=FORMATS, default="text")
    render.add_argument("--out", type=Path, metavar="FILE", help="write a file instead of standard output")
    render.set_defaults(run=_render)
    diff = kinds.add_parser("diff", help="what changed; exit status 1 for regressions")
    diff.add_argument("before", type=Path, metavar="BEFORE")
    diff.add_argument("after", type=Path, metavar="AFTER")
    diff.add_argument(
        "--drift", type=drift, default=DRIFT, metavar="SHARE", help="growth in error-budget use that is a regression"
    )
    diff.set_defaults(run=_diff)
    merge = kinds.add_parser("merge", help="one report from those of all shards")
    merge.add_argument("shards", type=Path, nargs="+", metavar="SHARD")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE")
    merge.set_defaults(run=_merge)
    kinds.add_parser("schema", help="print the JSON Schema of report.json").set_defaults(run=_schema)


def drift(text: str) -> float:
    """A limit on drift, as an option gives it.

    Raises:
        argparse.ArgumentTypeError: it is no share of the error budget.
    """
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"expected a share of the error budget from 0 to 1, got {text}")
    return share


def _render(options: argparse.Namespace) -> int:
    text = FORMATS[options.format](load_report(options.report))
    if options.out:
        write_output(options.out, text)
    else:
        put(text.rstrip("\n"))
    return 0


def _diff(options: argparse.Namespace) -> int:
    before, after = load_report(options.before), load_report(options.after)
    if said := suites_differ(before, after):
        say(said)
    changes = compare(before, after, options.drift)
    for change in changes:
        say(change.line)
    regressions = sum(change.regression for change in changes)
    say(f"{counted(regressions, 'regression')}, {counted(len(changes) - regressions, 'other change')}")
    return 1 if regressions else 0


def _merge(options: argparse.Namespace) -> int:
    merged = merge_shards([load_report(path) for path in options.shards])
    write_output(options.out, to_text(report_json(merged)))
    say(closing_line(merged))
    return _INCOMPLETE if merged.counts.not_run else 0


def _schema(options: argparse.Namespace) -> int:
    put(json.dumps(schema(), indent=1))
    return 0
