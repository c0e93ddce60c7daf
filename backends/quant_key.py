"""Quantisation keys: how an output is quantised, as a hashable value (vLLM's ``QuantKey``)."""

from typing import NamedTuple

import torch


class ScaleDesc(NamedTuple):
    """A scale's dtype, whether it is known before the call (static), and how many rows and columns it covers."""

    dtype: torch.dtype
    static: bool
    group_shape: tuple[int, int]  # -1 is the whole axis


class QuantKey(NamedTuple):
    """Stored dtype, scale and symmetry of a quantised tensor; symmetric means no zero point."""

    dtype: torch.dtype
    scale: ScaleDesc
    symmetric: bool = True


def fp8_static_tensor_sym() -> QuantKey:
    """Key ``kFp8StaticTensorSym``: e4m3 codes of value / scale, one static float32 scale for the tensor."""
    return QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static=True, group_shape=(-1, -1)))
