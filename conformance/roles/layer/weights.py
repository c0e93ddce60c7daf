"""Weights of a layer: drawn, and as a model holds them."""

import math

import torch

from mla_conformance.reference.projections import kv_b_proj
from mla_conformance.roles.layer.case import LayerCase

_FACTORS = (1.0, -1.0, 0.5, -0.5)
_GRID = 32
"""Steps of the grid in a standard deviation of dense weights; four deviations are within an int8."""


class Linear:
    """A linear layer as vLLM has them: called, it returns its bias as well.

    Attributes:
        weight: [out, in].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.mT, None


class PackedLinear:
    """The same with its weight in codes, under the name that packed formats have for it.

    Attributes:
        qweight: [out, in] int8.
        unit: what a code of 1 stands for, a power of two.
    """

    def __init__(self, dense: Linear) -> None:
        largest = float(dense.weight.abs().max())
        self.unit = 2.0 ** math.ceil(math.log2(largest / 127))
        self.qweight = (dense.weight / self.unit).to(torch.int8)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ (self.qweight.to(x.dtype) * self.unit).mT, None


def draw_weights(case: LayerCase, generator: torch.Generator) -> torch.Tensor:
    """[L, N, P + V] float64 of [W_UK; W_UV] for each head; P and V of selections may not exceed L.

    Args:
        case: the case.
        generator: of the batch; or of the case's model, whose weights are the same in every batch.
    """
    dims, draw = case.dimensions, _dense if case.weights == "dense" else selection
    widths = (dims.qk_nope_head_dim, dims.v_head_dim)
    return kv_b_proj(*(draw(case.kv_lora_rank, case.heads, width, generator) for width in widths))


def as_linear(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Linear:
    """``kv_b_proj`` of [L, N, P + V]: one row of [N·(P + V), L] for each column."""
    return Linear(weight.flatten(1).mT.to(dtype).to(device).contiguous())


def selection(latents: int, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[latents, heads, width] with one non-zero in each column, no two columns of a head in the same row."""
    weight = torch.zeros(latents, heads, width, dtype=torch.float64)
    column = torch.arange(width)
    for head in range(heads):
        picked = torch.randperm(latents, generator=generator)[:width]
        factor = torch.tensor(_FACTORS, dtype=torch.float64)[
            torch.randint(len(_FACTORS), (width,), generator=generator)
        ]
        weight[picked, head, column] = factor
    return weight


def _dense(latents: int, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """[latents, heads, width], normal with a variance near 1/latents."""
    unit = 2.0 ** -round(math.log2(_GRID * latents**0.5))
    normal = torch.randn(latents, heads, width, generator=generator, dtype=torch.float64)
    return (normal * _GRID).round().clamp(-127, 127) * unit
