"""The judge's numbers, read from tolerance.toml."""

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated

from msgspec import Meta, Struct, defstruct

from mla_conformance.files.inputs import InputError, convert


@dataclass(frozen=True)
class Tolerance:
    """The numbers by name; see tolerance.toml for the reason of each."""

    float32_accumulation: float
    keys_per_step: float
    fp22_accumulation: float
    fp22_keys_per_step: float
    approximate_exp: float
    element_limit: float
    row_deviations: float
    lse_limit: float


class _Entry(Struct, forbid_unknown_fields=True):
    value: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    reason: Annotated[str, Meta(pattern=r"\S")]


_Table = defstruct("_Table", [(name, _Entry) for name in Tolerance.__dataclass_fields__], forbid_unknown_fields=True)


def read_tolerance(text: str, source: str) -> Tolerance:
    """Parse a table of numbers.

    Raises:
        InputError: not TOML, an unknown or missing entry, an entry without a reason, or a value that is not a positive
            number.
    """
    try:
        table = convert(tomllib.loads(text), _Table, source)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from error
    return Tolerance(**{name: getattr(table, name).value for name in Tolerance.__dataclass_fields__})


@cache
def tolerance() -> Tolerance:
    """The table that the suite ships."""
    return read_tolerance((files("mla_conformance.judging") / "tolerance.toml").read_text(), "tolerance.toml")
