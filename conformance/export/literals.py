"""Values and statements as source text."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mla_conformance.export.recording import bare

WIDTH = 112
"""Characters of a line at most, unless it cannot be broken."""


class NotWritable(ValueError):
    """What cannot be put into a script, as one sentence."""


class TooLong(NotWritable):
    """What would fit into a script, were the case smaller."""


def literal(value: Any) -> str:
    """A plain value as source text.

    Raises:
        NotWritable: it is of another kind.
    """
    if isinstance(value, torch.device):
        return '"cpu"' if value.type == "cpu" else "DEVICE"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value).replace("'", '"') if isinstance(value, str) else repr(value)
    raise NotWritable(f"the call has an argument of type {type(bare(value)).__name__}, which cannot be written down")


def folded(text: str) -> list[str]:
    """A statement in lines of WIDTH characters: broken between the arguments of its outer call, else in brackets."""
    if len(text) <= WIDTH:
        return [text]
    lines = [""]
    for part in _arguments_of(text):
        lines[-1:] = [lines[-1] + part] if len(lines[-1] + part.rstrip()) <= WIDTH else [lines[-1], f"    {part}"]
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [row for line in lines for row in wrapper.wrap(line)]


def assigned(values: Mapping[str, str]) -> list[str]:
    """Names that get the values of expressions, as many in a line as there is room for."""
    rows: list[list[str]] = []
    for name in values:
        if not rows or len(_assignment([*rows[-1], name], values)) > WIDTH:
            rows.append([])
        rows[-1].append(name)
    return [line for row in rows for line in folded(_assignment(row, values))]


def _assignment(names: Sequence[str], values: Mapping[str, str]) -> str:
    return f"{', '.join(names)} = {', '.join(values[name] for name in names)}"


def _arguments_of(text: str) -> list[str]:
    """A text, cut behind its first bracket and behind each comma that stands in one bracket alone."""
    depth, start = 0, 0
    parts: list[str] = []
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and (character == "," or (character in "([{" and not parts)):
            parts.append(text[start : at + 1 + (character == ",")])
            start = at + 1 + (character == ",")
    return [*parts, text[start:]]
