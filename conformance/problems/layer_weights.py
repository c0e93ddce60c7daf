"""Projections of a layer that round nothing, so that a layer is judged as sharply as its kernels.

Each column of W_UK and W_UV picks one latent of its own, signed and times a power of two, another one for every head.
Absorbing the query, up-projecting keys and values, and projecting the output then are exact in every dtype: prefill
and decode see the same real operands, and a transposed or misplaced weight changes everything.
"""

import torch

from mla_conformance.cases.layer import LayerCase
from mla_conformance.reference.projections import kv_b_proj

_FACTORS = (1.0, -1.0, 0.5, -0.5)


class Linear:
    """A linear layer as vLLM has them: called, it returns its bias as well.

    Attributes:
        weight: [out, in].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[tokens, in] to ([tokens, out], None), in the dtype of ``x``."""
        return x @ self.weight.mT, None


class PackedLinear:
    """The same with its weight in codes of half a unit, under the name that packed formats have for it.

    Attributes:
        qweight: [out, in] int8.
    """

    def __init__(self, dense: Linear) -> None:
        self.qweight = (dense.weight * 2).to(torch.int8)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As :class:`Linear`."""
        return x @ (self.qweight.to(x.dtype) / 2).mT, None


def selections(case: LayerCase, generator: torch.Generator) -> torch.Tensor:
    """[L, N, P + V] float64 of [W_UK; W_UV] for each head; P and V may not exceed L."""
    dims = case.dimensions
    widths = (dims.qk_nope_head_dim, dims.v_head_dim)
    return kv_b_proj(*(_selection(case.kv_lora_rank, case.heads, width, generator) for width in widths))


def as_linear(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Linear:
    """``kv_b_proj`` of [L, N, P + V]: one row of [N·(P + V), L] for each column."""
    return Linear(weight.flatten(1).mT.to(dtype).to(device).contiguous())


def _selection(latents: int, heads: int, width: int, generator: torch.Generator) -> torch.Tensor:
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
