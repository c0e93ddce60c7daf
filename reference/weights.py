"""From scores to weights: the exponential in float64, its sums, and the products that error terms are made of.

On a GPU this is bound by memory: 44 bytes an element as separate operations, 24 as one kernel, which torch.compile
makes of the same lines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_SEGMENT = 512
"""Width of the sums that a compiled kernel holds in registers; a constant, so that one kernel serves every block."""
_COMPILED_ELEMENTS = 2**22

Products = tuple[Tensor, Tensor, Tensor]
"""p, p·magnitude and p², each [h, r, c] in low precision."""


@dataclass(frozen=True)
class Totals:
    """Sums over the keys so far, [h, r, 1]: of p in float64; largest p and sum of p·magnitude in float32, or None."""

    total: Tensor
    largest: Tensor | None = None
    score_total: Tensor | None = None


def weigh(scores: Tensor, shift: Tensor | None, magnitudes: Tensor | None, totals: Totals) -> Products | None:
    """Turn scores [h, r, c] float64 into weights p = exp(scores - shift) in their place, and add p to the totals.

    shift: [h, r, 1] float64, or None for 0. magnitudes: [h, r, c], bounds of the scores in low precision, overwritten;
    without them there are no products.
    """
    if magnitudes is None:
        totals.total.add_(_exponentials(scores, shift).sum(-1, keepdim=True))
        return None
    sums = (totals.total, totals.largest, totals.score_total)
    if not scores.is_cuda or scores.numel() < _COMPILED_ELEMENTS or scores.shape[-1] % _SEGMENT:
        return _products(scores, shift, magnitudes, *sums)
    # Always a shift: without one it would be another kernel.
    return _compiled()(scores, torch.zeros_like(totals.total) if shift is None else shift, magnitudes, *sums)


def _exponentials(scores: Tensor, shift: Tensor | None) -> Tensor:
    return (scores if shift is None else scores.sub_(shift)).exp_()


def _products(
    scores: Tensor, shift: Tensor | None, magnitudes: Tensor, total: Tensor, largest: Tensor, score_total: Tensor
) -> Products:
    p = _exponentials(scores, shift)
    low = p.to(magnitudes.dtype)
    weighted = magnitudes.mul_(low)
    total.add_(p.sum(-1, keepdim=True))
    largest.copy_(torch.maximum(largest, low.amax(-1, keepdim=True)))
    score_total.add_(weighted.sum(-1, keepdim=True, dtype=torch.float32))
    return low, weighted, low.square()


def _products_in_segments(
    scores: Tensor, shift: Tensor, magnitudes: Tensor, total: Tensor, largest: Tensor, score_total: Tensor
) -> Products:
    """The same for keys in whole segments, each summed by itself, so that a kernel reads every score once."""
    cut = (*scores.shape[:2], -1, _SEGMENT)
    p = scores.view(cut).sub_(shift.unsqueeze(-1)).exp_()
    low = p.to(magnitudes.dtype)
    weighted = magnitudes.view(cut).mul_(low)
    total.add_(p.sum(-1).sum(-1, keepdim=True))
    largest.copy_(torch.maximum(largest, low.amax(-1).amax(-1, keepdim=True)))
    score_total.add_(weighted.sum(-1, dtype=torch.float32).sum(-1, keepdim=True))
    return low.view_as(scores), weighted.view_as(scores), low.square().view_as(scores)


@cache
def _compiled() -> Callable[..., Products]:
    """The products as one kernel, or as they stand where this machine has no compiler for it."""
    compiled = torch.compile(_products_in_segments, dynamic=True)
    try:
        scores, sums = torch.zeros(2, 3, 4 * _SEGMENT, device="cuda"), torch.zeros(2, 3, 1, device="cuda")
        compiled(scores.double(), sums.double(), scores.bfloat16(), sums.double(), sums, sums.clone())
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return _products
    return compiled
