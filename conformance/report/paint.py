"""Colour for lines on a terminal that shows it; what they mean is in their words and signs as well."""

import os
from typing import TextIO

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
