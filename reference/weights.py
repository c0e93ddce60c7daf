"""From scores to weights: the exponential in float64, its sums, and the products that error terms are made of.

On a GPU this is bound by memory: 44 bytes an element as separate operations, 24 as one kernel, which torch.compile
makes of the same lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_SEGMENT = 256
"""Width of the sums that a compiled kernel holds in registers; a constant, so that one kernel serves every tile."""
_COMPILED_ELEMENTS = 2**22

Products = tuple[Tensor, Tensor, Tensor]
"""p, p·magnitude and p², each [h, r, c] in low precision."""


@dataclass(frozen=True)
class Weights:
    """Weights p of a tile, which stand where its scores were.

    Attributes:
        sums: [h, r, 1] float64, Σ p; with error terms [h, r, 2], Σ p and Σ p·magnitude.
        largest: [h, r, 1], the largest p, in low precision; None without error terms.
        products: None without error terms.
    """

    sums: Tensor
    largest: Tensor | None = None
    products: Products | None = None


def weigh(scores: Tensor, magnitudes: Tensor | None) -> Weights:
    """Turn scores [h, r, c] float64 into weights p = exp(scores) in their place.

    magnitudes: [h, r, c], bounds of the scores in low precision, overwritten; without them there are no products.
    """
    if magnitudes is None:
        return Weights(scores.exp_().sum(-1, keepdim=True))
    heads, rows, keys = scores.shape
    fused = scores.is_cuda and scores.numel() >= _COMPILED_ELEMENTS and keys % _SEGMENT == 0
    width, step = (_SEGMENT, _compiled()) if fused else (keys, _products)
    # One row for each segment, so that the number of rows is all that differs between tiles.
    sums, largest, *low = step(scores.view(-1, width), magnitudes.view(-1, width))
    p, weighted, squared = (x.view(scores.shape) for x in low)
    largest = largest.view(heads, rows, -1).amax(-1, keepdim=True)
    return Weights(sums.view(heads, rows, -1, 2).sum(2), largest, (p, weighted, squared))


def _products(scores: Tensor, magnitudes: Tensor) -> tuple[Tensor, ...]:
    """Of each row [m, width]: sums of p and of p·magnitude [m, 2], largest p; then p, p·magnitude and p²."""
    p = scores.exp_()
    low = p.to(magnitudes.dtype)
    weighted = magnitudes.mul_(low)
    sums = torch.stack((p.sum(-1), weighted.sum(-1, dtype=torch.float64)), dim=-1)
    return sums, low.amax(-1), low, weighted, low.square()


@cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    """The products as one kernel for any number of rows, or as they stand where this machine has no compiler."""
    compiled = torch.compile(_products)
    scores = torch.zeros(96, _SEGMENT, device="cuda")
    operands = (scores.double(), scores.bfloat16())
    for operand in operands:
        torch._dynamo.mark_dynamic(operand, 0)
    try:
        compiled(*operands)
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return _products
    return compiled
