"""Lines for a terminal, and texts from elsewhere as they may be shown: cut where long, and nothing in them acted upon.

What a terminal obeys, no encoding holds, or a CI system takes for a command in a job's log stands there as an escape.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TextIO

from mla_conformance.backends.foreign import LINE, MESSAGE, cut

_HALF = 600  # characters at each end of a reason that are always printed
_LINE_WIDTH, _UNBROKEN = 80, "\xa0"
_wrap = partial(wrap, break_long_words=False, break_on_hyphens=False)
_INSTALL = re.compile(r"\(pip install [^()]*\)")
_ARGUMENT = re.compile(r"(?:--[\w-]+ (?!-))?(?:'[^']*'|\S)+")  # a word of a command, or an option with its value
_lost: list[OSError] = []
_COMMAND = re.compile(r"#(?=#\w*\[)")  # what CI systems obey wherever it stands: ``##[name]``, ``##vso[name]``
_COMMAND_LINE = re.compile(r"^(\s*):(?=:)")  # what GitHub reads as one where a line begins with it: ``::name::``


def shown(text: str, limit: int = MESSAGE) -> str:
    """A text as a part of one line."""
    text = _COMMAND.sub(r"\\x23", cut(text, limit))
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_line(text: str) -> str:
    return _COMMAND_LINE.sub(r"\1\\x3a", shown(text, LINE))


def shown_lines(text: str, limit: int = LINE) -> str:
    return "\n".join(map(shown_line, cut(text, limit).split("\n")))


def say(*lines: str, error: bool = False) -> None:
    for line in lines:
        put(painted(shown_line(line), sys.stderr if error else sys.stdout), error)


def refuse(program: str, reason: str) -> None:
    """Print why a command is not carried out; a long reason keeps its ends: what is wrong, and what was expected."""
    reason = shown(reason, 4 * len(reason))
    if (left_out := len(reason) - 2 * _HALF) > 0:
        reason = f"{reason[:_HALF]}… and {left_out:,} more characters …{reason[-_HALF:]}"
    say(f"{program}: {reason}", error=True)


def put(text: str, error: bool = False) -> None:
    """Print what is fit to be shown, or made for machines, as it stands; that nobody takes it is said once."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as failure:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not error:
            _lost.append(failure)
            say(f"mla-conformance: standard output cannot be written: {failure.strerror}", error=True)


def is_read() -> bool:
    return not _lost


def near(path: Path) -> Path:
    """A path as one would write it in the current folder, if there is one and it is below that."""
    with contextlib.suppress(OSError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def wrapped(text: str, width: int, first: str = "", further: str = "") -> list[str]:
    """A text in lines of ``width`` columns that begin with these indents; no word and no ``(pip …)`` is cut."""
    text = _INSTALL.sub(lambda found: found[0].replace(" ", _UNBROKEN), text)
    lines = _wrap(text, width, initial_indent=first, subsequent_indent=further)
    return [line.replace(_UNBROKEN, " ") for line in lines]


def side_by_side(texts: Iterable[str], mark: str, width: int, first: str = "", further: str = "") -> list[str]:
    """Texts with a mark between them, in lines of ``width`` columns; no text is divided, no line begins with a mark."""
    between = mark.rstrip().replace(" ", _UNBROKEN) + " "
    return wrapped(between.join(text.replace(" ", _UNBROKEN) for text in texts), width, first, further or 2 * first)


def typed(command: str, width: int, indent: str = "") -> list[str]:
    """A command in lines of ``width`` columns, as one types it; an option and its value stay on one line."""
    lines = side_by_side(_ARGUMENT.findall(command), " ", width - 2, indent, f"{indent}    ")
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def fitting(head: str, names: Sequence[str], width: int) -> str:
    """One line with as many of the names as it holds, one at least, and how many more there are."""
    for shown in range(min(len(names), width), 0, -1):
        more = f" and {len(names) - shown} more" if shown < len(names) else ""
        line = f"{head}{', '.join(names[:shown])}{more}"
        if len(line) <= width:
            break
    return line


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def columns() -> int:
    """Width of the terminal, or what COLUMNS says; of no use below 60, nor for reading above 140."""
    return min(max(get_terminal_size((_LINE_WIDTH, 24)).columns, 60), 140)


def say_wrapped(text: str, further: str = "") -> None:
    say(*wrapped(text, columns(), further=further))


_STYLES = {
    r"✔": "green",
    r"✘|^wrong:|\b[1-9]\d* failed\b|^mla-conformance:": "bold red",
    r"\d+ NOT RUN|\bunavailable\b": "yellow",
    r"^ +– .*|^ +declares .*|^….*": "dim",
    r"(?<=replay: ).*": "cyan",
}


def painted(line: str, stream: TextIO) -> str:
    """A line of a report with colours, where the stream, NO_COLOR, FORCE_COLOR and TERM let it have some."""
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
