"""``export --issue``: a failure of a run or of a record as the text of an issue."""

import argparse
from pathlib import Path

from mla_conformance.certificate.certificate import Shown, read_shown, shown_of
from mla_conformance.certificate.records import is_records, kept_records
from mla_conformance.export.issue import Issue, issues_of, markdown_of
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_output
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import CLAUSES, Check, Status
from mla_conformance.report.loading import is_report, load_report, report_file
from mla_conformance.report.terminal import put
from mla_conformance.scoreboard.entry import Entry, Failure


def write_issue(options: argparse.Namespace) -> int:
    """Print or write the text; the exit status."""
    if options.case or options.backend:
        raise InputError("export: --issue cannot be combined with a case or --backend; the report names both")
    issues = _issues(options.issue)
    if not issues:
        raise InputError(f"{options.issue}: expected a report or record with a failure, got none")
    if not 1 <= options.failure <= len(issues):
        listed = "; ".join(f"{number}. {issue.title}" for number, issue in enumerate(issues, start=1))
        raise InputError(f"{options.issue}: expected --failure 1 to {len(issues)}, got {options.failure}: {listed}")
    text = markdown_of(issues[options.failure - 1])
    if options.out:
        write_output(options.out, text)
    else:
        put(text.rstrip("\n"))
    return 0


def _issues(path: Path) -> list[Issue]:
    """Of a run's report, of a record, or of all records of a file."""
    if is_report(path):
        return issues_of(load_report(path))
    path = report_file(path)
    found = [shown_of(each.certificate) for each in kept_records(path)] if is_records(path) else [read_shown(path)]
    return [_of_failure(failure, shown) for shown in found for failure in Entry(shown, "").failures]


def _of_failure(failure: Failure, shown: Shown) -> Issue:
    found = failure.example
    clause = CLAUSES[Check(found.check)] if found.check in set(Check) else ""
    example = Record(
        shown.backend,
        shown.reference,
        found.case.partition(":")[0],
        found.case,
        Status.FAIL,
        message=found.message.removesuffix(f" (SPEC {clause})"),
        check=found.check,
        clause=clause,
        salt=shown.environment.get("salt", ""),
    )
    further = tuple(each.case for each in failure.findings if each is not found)
    machine = {"device": shown.device, **shown.environment}
    return Issue(shown.backend, failure.reason, shown.distributions, machine, shown.suite, example, further)
