"""Values of a case's fields: as text of an id, as JSON and in lists of cases, and what names stand for."""

import re
from enum import StrEnum
from functools import cache
from itertools import chain, groupby
from typing import Any

from mla_conformance.reference.dimensions import PRESETS, MLADimensions

Data = StrEnum(  # what the values of a case's inputs are like
    "Data",
    "NORMAL NEEDLE HOT_TAIL HOT_ONES LARGE_LOGITS HUGE_LOGITS EXTREME_LOGITS NEGATIVE SHIFTED RISING RISING_ONES ONES "
    "INTEGERS OUTLIERS LOW_RANK TINY_VALUES ZERO_KEYS",
)
MOST_REQUESTS = 2**16  # of a case; the longest list of the suite has 16,500
LARGEST = 2**31  # any number of a case, and the tokens of all its requests; the suite's largest batch has 1,049,190
_LONGEST_ID = 2**20
_LIST = re.compile(r"\[(\d+(x\d+)?(,\d+(x\d+)?)*)?\]", re.ASCII)
_ROUNDS = re.compile(r"\[\((\d+(?:,\d+)+)\)x(\d+)\]", re.ASCII)


class CaseError(ValueError):
    """A case that cannot be read or contradicts itself."""


def require_id(text: str) -> None:
    """CaseError if a text is not made of what ids are, whatever they say; what is written as one is shown as one."""
    if len(text) > _LONGEST_ID:
        raise CaseError(f"malformed case id: expected at most {_LONGEST_ID:,} characters, got {len(text):,}")
    if not re.fullmatch("[a-z0-9_]+:[!-~]*", text):
        raise CaseError(f"malformed case id {text!r}: expected 'capability:field=value;…' in ASCII, without spaces")


def format_value(value: object) -> str:
    """A value as it stands in an id.

    Different lengths that come again and again, eight times or more, are (LENGTHS)xTIMES; four or more equal ones in a
    row are LENGTHxTIMES.
    """
    if not isinstance(value, tuple):
        return str(int(value)) if isinstance(value, bool) else str(value)
    for size in range(2, len(value) // 8 + 1) if len(set(value)) > 1 else ():
        first, times = value[:size], len(value) // size
        if first * times == value:
            return f"[({','.join(map(str, first))})x{times}]"
    runs = [(length, len(list(group))) for length, group in groupby(value)]
    listed = ([f"{length}x{n}"] if n >= 4 else [str(length)] * n for length, n in runs)
    return f"[{','.join(chain.from_iterable(listed))}]"


def parse_value(name: str, kind: Any, text: str) -> Any:
    """The value of a field's type ``kind`` that :func:`format_value` wrote, else CaseError."""
    try:
        if kind is str:
            return text
        if kind is bool:
            return {"0": False, "1": True}[text]
        if kind is int and re.fullmatch("-?[0-9]+", text):
            return int(text)
        if kind is not int and (rounds := _ROUNDS.fullmatch(text)):
            runs = [(tuple(map(int, rounds[1].split(","))), int(rounds[2]))]
        elif kind is not int and _LIST.fullmatch(text):
            items = [item.partition("x") for item in text[1:-1].split(",") if item]
            runs = [((int(length),), int(times or 1)) for length, _, times in items]
        else:
            raise ValueError
    except (ValueError, KeyError):
        lists = "a list such as [64,0,17], [1x48,7] or, alone, [(5,9)x24]"
        expected = {int: "an integer", bool: "0 or 1"}.get(kind, lists)
        raise CaseError(f"field {name}: expected {expected}, got {text!r}") from None
    require_requests(name, sum(len(lengths) * times for lengths, times in runs))  # before it is written out
    return tuple(chain.from_iterable(lengths * times for lengths, times in runs))


def require_requests(name: str, count: int) -> None:
    if count > MOST_REQUESTS:
        raise CaseError(f"field {name}: expected at most {MOST_REQUESTS:,} requests, got {count:,}")


@cache
def dimensions_of(name: str) -> tuple[MLADimensions, int]:
    """Head dims and latent dim L of a preset of the reference, or of ``P-R-V-L``; CaseError if it is neither."""
    if name in PRESETS:
        return PRESETS[name]
    numbers = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})-([0-9]{1,9})", name)
    if not numbers:
        known = ", ".join(PRESETS)
        raise CaseError(f"unknown dims {name!r}; expected one of {known}, or P-R-V-L such as 128-64-128-512")
    nope, rope, value, latent = map(int, numbers.groups())
    if latent < 1:
        raise CaseError(f"dims {name!r}: expected a positive latent dim L, got {latent}")
    try:
        return MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value), latent
    except ValueError as error:
        raise CaseError(f"dims {name!r}: {error}") from error


Fields = dict[str, Any]
Lengths = tuple[int, ...]
