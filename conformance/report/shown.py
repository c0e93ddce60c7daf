"""Texts from elsewhere as they may be shown: cut where they are long, and nothing in them is acted upon.

A report may come from anywhere. What a terminal obeys instead of showing it (control and bidi characters, ends of
lines), what no encoding holds (halves of surrogate pairs) and what a CI system takes for a command in a job's log
stands there as an escape. Every printer shows texts through these functions.
"""

import re

MESSAGE = 4 * 2**10
"""Bytes that are shown of a message."""
LINE = 64 * 2**10
"""Bytes of the longest line, and of the longest text of several; a command to copy may be that long."""
_COMMAND = re.compile(r"#(?=#\w*\[)")
"""What GitHub, Azure and TeamCity read as a command wherever it stands: ``##[name]``, ``##vso[name]``."""
_COMMAND_LINE = re.compile(r"^(\s*):(?=:)")
"""What GitHub reads as one where a line begins with it: ``::name::``."""


def cut(text: str, limit: int = MESSAGE) -> str:
    """The first ``limit`` bytes of a text, and how many characters are left out behind them."""
    kept = len(text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore"))
    return text if kept == len(text) else f"{text[:kept]}… and {len(text) - kept:,} more characters"


def shown(text: str, limit: int = MESSAGE) -> str:
    """A text as a part of one line."""
    text = _COMMAND.sub(r"\\x23", cut(text, limit))
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown_line(text: str) -> str:
    """A text as a line of its own."""
    return _COMMAND_LINE.sub(r"\1\\x3a", shown(text, LINE))


def shown_lines(text: str, limit: int = LINE) -> str:
    """A text as several lines, where it has them."""
    return "\n".join(map(shown_line, cut(text, limit).split("\n")))
