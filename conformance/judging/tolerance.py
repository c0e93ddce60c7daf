"""From declared rounding classes to unit roundoffs: the numbers that the error budget is made of (SPEC 4.2)."""

import math
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated

import torch
from msgspec import Meta, Struct, defstruct

from mla_conformance.backends.declaration import LseClass, Precision, Rounding
from mla_conformance.files.whole import convert
from mla_conformance.reference.error_budget import Roundoffs


@dataclass(frozen=True)
class Tolerance:
    """The numbers by name; see tolerance.toml for the reason of each."""

    float32_accumulation: float
    keys_per_step: float
    float32_walk: float
    fp22_accumulation: float
    fp22_columns_per_step: float
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
    table = convert(tomllib.loads(text), _Table, source)
    return Tolerance(**{name: getattr(table, name).value for name in Tolerance.__dataclass_fields__})


@cache
def tolerance() -> Tolerance:
    text = (files("mla_conformance.judging") / "tolerance.toml").read_text(encoding="utf-8")
    return read_tolerance(text, "tolerance.toml")


_FP22_ROUNDOFF, _FLUSHED = 2.0**-13, 2.0**-126
_E4M3_ROUNDOFF, _E4M3_FLOOR = 2.0**-4, 2.0**-10
SCALED_P = 2.0**8  # by which a kernel scales P before rounding it to e4m3, so that P = 1 stays below the largest code


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: half the distance from 1 to the next value."""
    return float(torch.finfo(dtype).eps / 2)


def _errors(precision: Precision, model: torch.dtype) -> tuple[float, float]:
    """The unit roundoff of a precision, and the floor of a value that is stored in it; 0 where it does not round."""
    if precision in (Precision.E4M3, Precision.SCALED_E4M3):
        return _E4M3_ROUNDOFF, _E4M3_FLOOR / (SCALED_P if precision is Precision.SCALED_E4M3 else 1.0)
    dtypes = {
        Precision.FLOAT16: (torch.float16,),
        Precision.MODEL: (model,),
        Precision.MODEL_OR_FLOAT16: (model, torch.float16),
    }.get(precision, ())
    # Half the smallest subnormal; what float32 holds as a subnormal may be 0, since processors flush those.
    floors = (max(float(torch.finfo(dtype).smallest_normal) * unit_roundoff(dtype), _FLUSHED) for dtype in dtypes)
    return max(map(unit_roundoff, dtypes), default=0.0), max(floors, default=0.0)


def roundoffs(
    model: torch.dtype,  # of the output, and of q, k and v unless these are e4m3
    declared: Rounding,
    numbers: Tolerance,
    parts: int = 0,  # roundings of an output on its way into the result: one for each merge, or for what is merged
    keys: int = 0,  # the most keys that a row sums over
    columns: int = 0,  # of a query and a key
    *,
    exact: bool = False,  # whether the result was merged exactly, and is not rounded
    dequantised: bool = False,  # whether the keys were stored as codes
    projected: bool = False,  # whether projecting latents rounds
    weighed: bool = False,  # whether roundings of parts and merges count by their shares in the result
) -> Roundoffs:
    rounding = Rounding() if model is torch.float32 else declared
    (unit, floor), (p, p_floor) = _errors(Precision.MODEL, model), _errors(rounding.p, model)
    partials, partials_floor = _errors(rounding.partial_outputs, model)
    stored_keys, stored_keys_floor = _errors(rounding.dequantised_keys, model)
    result = 0 if exact else 1
    # Values that are parts of the output, or that it is a mean of: each is off by its dtype's floor at most.
    stored = partials_floor + dequantised * stored_keys_floor
    truncated = _FP22_ROUNDOFF if rounding.accumulation is Precision.FP22 else 0.0
    return Roundoffs(
        p=p,
        p_floor=p_floor,
        partials=partials + (0.0 if weighed else parts * unit),
        output=result * unit,
        output_floor=(parts + result) * floor + stored,
        row_sum=p if rounding.lse is LseClass.ROUNDED_P else 0.0,
        exp=numbers.approximate_exp if rounding.lse is LseClass.APPROXIMATE_EXP else 0.0,
        accumulation=max(numbers.float32_accumulation, keys / numbers.keys_per_step),
        walk=numbers.float32_walk * math.sqrt(keys),
        keys=stored_keys if dequantised else 0.0,
        scores=truncated * max(numbers.fp22_accumulation, columns / numbers.fp22_columns_per_step),
        values=truncated * max(numbers.fp22_accumulation, keys / numbers.fp22_keys_per_step),
        projections=unit if projected else 0.0,
        values_floor=floor,
        latent_partials=partials if projected else 0.0,
        merges=unit if weighed else 0.0,
    )
