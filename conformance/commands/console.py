"""What a person sees of a run: header, failures as they come, progress, the outcome per backend, closing line."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from mla_conformance.files.outputs import write_whole
from mla_conformance.judging.record import Record, describe_failure
from mla_conformance.report.html import html
from mla_conformance.report.json_report import report_json, write_json
from mla_conformance.report.markdown import markdown
from mla_conformance.report.summary import RunSummary
from mla_conformance.report.terminal import backend_lines, closing_line, header, say
from mla_conformance.running.certify import Run, RunError, environment

REPORT_NAME = "report.json"
PAGE_NAME = "report.html"
_BROKEN = 3
_INTERRUPTED = 130


class Progress:
    """The first failure of each capability as it comes; a counter on a terminal, a line per tenth elsewhere."""

    def __init__(self, run: Run) -> None:
        self.total = sum(run.expected.values()) * len(run.available)
        self.done = self.failed = 0
        self._shown: set[tuple[str, str]] = set()

    def __call__(self, record: Record) -> None:
        """Take one record."""
        self.done += 1
        if record.failed:
            self.failed += 1
            self._show(record)
        self._count(record)

    def _show(self, record: Record) -> None:
        key = (record.backend, record.capability)
        if key not in self._shown:
            self._shown.add(key)
            self._clear()
            say(describe_failure(record))

    def _count(self, record: Record) -> None:
        text = f"{self.done}/{self.total} judged, {self.failed} failed"
        if sys.stdout.isatty():
            self._clear()
            if self.done < self.total:
                sys.stdout.write(f"{text} · {record.backend} {record.capability}")
                sys.stdout.flush()
        elif self.done * 10 // max(1, self.total) > (self.done - 1) * 10 // max(1, self.total):
            say(f"… {text}")

    def _clear(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\r\x1b[K")

    @property
    def hidden(self) -> int:
        """Failures that were counted but not shown."""
        return self.failed - len(self._shown)


def run_and_report(run: Run, as_json: bool = False, keep_report: bool = True) -> int:
    """Execute a run, write ``report.json``, show the outcome, and return the exit status.

    Args:
        run: what to execute.
        as_json: print the report instead of text.
        keep_report: whether the run's folder outlives the command, so that it is worth naming.

    Raises:
        RunError: pytest could not be started with these arguments.
    """
    if not as_json:
        shard = f" · shard {run.shard} of {len(run.selection.case_ids)}" if run.shard else ""
        say(header(environment(run.selection), len(run.cases), run.selection.explore) + shard)
    report = run.directory / REPORT_NAME
    for name in (REPORT_NAME, PAGE_NAME):
        (run.directory / name).unlink(missing_ok=True)  # what is there is of another run
    progress = Progress(run)
    broken, status = _execute(run, _ignore if as_json else progress)
    summary = run.summary()
    unwritten = _write(report, summary, views=keep_report)
    if as_json:
        say(json.dumps(report_json(summary), indent=1, ensure_ascii=False))
    else:
        _show_outcome(summary, progress, report if keep_report else None)
    for message in filter(None, (broken, unwritten)):
        say(f"mla-conformance: {message}", error=True)
    return status or summary.exit_status or (_BROKEN if broken or unwritten else 0)


def _execute(run: Run, on_record: Callable[[Record], None]) -> tuple[str, int]:
    """Run it; what kept it from its end, and the exit status if that decides it."""
    try:
        if run.available:
            run.execute(on_record)
    except RunError as error:
        if error.usage:
            raise
        return str(error), 0
    except KeyboardInterrupt:
        resume = f"mla-conformance certify --resume {shlex.quote(str(run.directory))}"
        return f"interrupted; to go on: {resume}", _INTERRUPTED
    return "", 0


def _ignore(record: Record) -> None:
    """A machine reads the report, not the progress."""


def _write(path: Path, summary: RunSummary, views: bool) -> str:
    """The report, and where it stays its views: the page beside it, and the step summary of a CI job that has one.

    Returns what went wrong, or nothing.
    """
    try:
        write_json(path, report_json(summary))
        if views:
            write_whole(path.with_name(PAGE_NAME), html(summary))
            if step_summary := os.environ.get("GITHUB_STEP_SUMMARY"):
                with Path(step_summary).open("a", encoding="utf-8") as file:
                    file.write(markdown(summary))
    except OSError as error:
        return f"cannot write {error.filename or path}: {error.strerror}; the journal beside it holds the verdicts"
    return ""


def _show_outcome(summary: RunSummary, progress: Progress, report: Path | None) -> None:
    if progress.hidden:
        say(f"… and {progress.hidden} more failures of these capabilities, each with its replay line in the report")
    for backend in summary.backends:
        for line in backend_lines(backend):
            say(line)
    say(closing_line(summary) + (f" · report {_short(report)}" if report else ""))


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
