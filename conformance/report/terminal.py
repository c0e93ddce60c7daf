"""Lines for a terminal: how they are printed and painted, and what is wrong with each backend."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TextIO

from mla_conformance.judging.record import Record
from mla_conformance.report.causes import Cause
from mla_conformance.report.shown import cut, shown_line
from mla_conformance.report.summary import BackendOutcome, RunSummary


def say(line: str, error: bool = False) -> None:
    """Print one line at once, whatever is in it."""
    put(painted(shown_line(line), sys.stderr if error else sys.stdout), error)


def put(text: str, error: bool = False) -> None:
    """Print what is fit to be shown, or made for machines, as it stands."""
    print(text, file=sys.stderr if error else sys.stdout, flush=True)


SIGN = {
    BackendOutcome.PASS: "✔",
    BackendOutcome.FAIL: "✘",
    BackendOutcome.UNSUPPORTED: "–",
    BackendOutcome.NOT_RUN: "?",
    BackendOutcome.UNAVAILABLE: "?",
}
_LINE_WIDTH = 118
_MOST_CAUSES = 7
_INDENT, _UNBROKEN = " " * 7, "\xa0"


def header(environment: dict[str, str], cases: int, drawn: int = 0, of: str = "") -> str:
    """One line on where the run takes place, and of how many cases; ``of`` says what they are of, a tier or a model."""
    asked = [of, counted(cases, "case") + (f" and {drawn} drawn ones" if drawn else "")]
    asked += [f"salt {environment['salt']}"] if "salt" in environment else []
    where = [f"{name} {environment[name]}" for name in ("device", "torch", "suite")]
    return " · ".join(filter(None, [*where, *asked, "golden float64", environment.get("judge", "")]))


def cause_lines(run: RunSummary, width: int) -> Iterator[str]:
    """What is wrong with each backend, in lines of ``width`` columns; replay lines stay whole, for copying."""
    for backend in run.backends:
        reported, hidden = backend.causes[:_MOST_CAUSES], backend.causes[_MOST_CAUSES:]
        for number, cause in enumerate(reported, start=1):
            head = f"wrong: {backend.name}, {_extent(backend.causes)}"
            if len(backend.causes) > 1:
                yield from [head] if number == 1 else []
                head = f"    {number}. {cases_of(cause)}{cause.reserve}"
            yield from _cause(f"{head}: {cut(cause.sentence)}{cut(cause.extent)}", cause, width)
        if hidden:
            yield f"    … and {counted(_failures(hidden), 'more case')} in the report"


def cases_of(cause: Cause) -> str:
    """How many cases fail of a cause."""
    return counted(len(cause.failures), "further case" if cause.kind == "further" else "case")


def _extent(causes: Sequence[Cause]) -> str:
    """How much is wrong with a backend: how many causes of it are likely, and of how many cases none is."""
    likely = [cause for cause in causes if cause.kind == "likely"]
    if not likely:
        return counted(_failures(causes), "case")
    further = _failures(causes) - _failures(likely)
    cases = counted(further, "further case") if further else counted(_failures(likely), "case")
    return f"{counted(len(likely), 'likely cause')}, {cases}"


def _failures(causes: Iterable[Cause]) -> int:
    return sum(len(cause.failures) for cause in causes)


def _cause(head: str, cause: Cause, width: int) -> Iterator[str]:
    example = from_here(cause.example)
    said = example.message.removesuffix(f" (SPEC {example.clause})")
    simplest = "" if len(cause.failures) == 1 else "simplest case: "
    details = ["" if said.endswith(cause.sentence) else f"{simplest}{said}", example.confirmed]
    yield from wrapped(head, width, further=_INDENT)
    for detail in details:
        yield from wrapped(cut(detail), width, _INDENT, _INDENT)
    yield f"{_INDENT}replay: {example.replay}"


def from_here(record: Record) -> Record:
    """A record whose backend is named as one would name it in the current folder."""
    location, _, name = record.reference.rpartition(":")
    return record.with_fields(reference=f"{near(Path(location))}:{name}") if location.endswith(".py") else record


def near(path: Path) -> Path:
    """A path as one would write it in the current folder, if it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def wrapped(text: str, width: int, first: str = "", further: str = "") -> list[str]:
    """A text in lines of ``width`` columns that begin with these indents; no word is cut."""
    return wrap(
        text, width, initial_indent=first, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def side_by_side(texts: Iterable[str], mark: str, width: int, indent: str = "") -> list[str]:
    """Texts with a mark between them, in lines of ``width`` columns; none of them is divided."""
    whole = mark.join(text.replace(" ", _UNBROKEN) for text in texts)
    return [line.replace(_UNBROKEN, " ") for line in wrapped(whole, width, indent, 2 * indent)]


def fitting(head: str, names: Sequence[str], width: int) -> str:
    """One line with as many of the names as it holds, one at least, and how many more there are."""
    for shown in range(len(names), 0, -1):
        more = f" and {len(names) - shown} more" if shown < len(names) else ""
        line = f"{head}{', '.join(names[:shown])}{more}"
        if len(line) <= width:
            break
    return line


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def columns() -> int:
    """Width of the terminal, or what COLUMNS says; of no use below 60, nor for reading above 140."""
    return min(max(get_terminal_size((_LINE_WIDTH, 24)).columns, 60), 140)


_STYLES = {
    r"✔": "green",
    r"✘|^wrong:|\b[1-9]\d* failed\b|^mla-conformance:": "bold red",
    r"\d+ NOT RUN|\bunavailable\b": "yellow",
    r"^ +– .*|^ +declares .*|^….*": "dim",
    r"(?<=replay: ).*": "cyan",
}


def painted(line: str, stream: TextIO) -> str:
    """A line of a report with colours, if the stream is a terminal that has some.

    NO_COLOR leaves them away, FORCE_COLOR has them put into a pipe, and TERM says what a terminal can do.
    """
    if os.environ.get("NO_COLOR") or not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return line
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    if console.color_system is None:
        return line
    text = Text(line)
    for pattern, style in _STYLES.items():
        text.highlight_regex(pattern, style)
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    return captured.get()
