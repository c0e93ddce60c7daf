"""From declared rounding classes to unit roundoffs: the numbers that the error budget is made of (SPEC 4.2)."""

import torch

from mla_conformance.backends.declaration import LseClass, Precision, Rounding
from mla_conformance.reference.error_budget import Roundoffs
from mla_conformance.tolerance import Tolerance

_E4M3_ROUNDOFF = 2.0**-4
_E4M3_FLOOR = 2.0**-10


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: half the distance from 1 to the next value."""
    return float(torch.finfo(dtype).eps / 2)


def _floor(dtype: torch.dtype) -> float:
    """Half the smallest subnormal: the absolute error of rounding values below the smallest normal."""
    return float(torch.finfo(dtype).smallest_normal) * unit_roundoff(dtype)


def _roundoff(precision: Precision, model: torch.dtype) -> float:
    if precision is Precision.E4M3:
        return _E4M3_ROUNDOFF
    return unit_roundoff(model) if precision is Precision.MODEL else 0.0


def _p_floor(precision: Precision, model: torch.dtype) -> float:
    if precision is Precision.E4M3:
        return _E4M3_FLOOR
    return _floor(model) if precision is Precision.MODEL else 0.0


def roundoffs(model: torch.dtype, rounding: Rounding, numbers: Tolerance, *, merged: bool = False) -> Roundoffs:
    """Unit roundoffs of a kernel.

    Args:
        model: dtype of q, k, v and the output.
        rounding: the classes that the adapter declares.
        numbers: the tolerance table.
        merged: the result was merged from stored outputs of several calls, each rounded once.
    """
    if model is torch.float32:
        rounding = Rounding()
    p = _roundoff(rounding.p, model)
    stored_parts = unit_roundoff(model) if merged else 0.0
    return Roundoffs(
        p=p,
        p_floor=_p_floor(rounding.p, model),
        partials=_roundoff(rounding.partial_outputs, model) + stored_parts,
        output=0.0 if merged else unit_roundoff(model),
        output_floor=_floor(model),
        row_sum=p if rounding.lse is LseClass.ROUNDED_P else 0.0,
        exp=numbers.approximate_exp if rounding.lse is LseClass.APPROXIMATE_EXP else 0.0,
        accumulation=numbers.float32_accumulation,
    )
