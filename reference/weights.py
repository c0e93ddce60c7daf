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
    assert totals.largest is not None and totals.score_total is not None
    heads, rows, keys = scores.shape
    fused = scores.is_cuda and scores.numel() >= _COMPILED_ELEMENTS and keys % _SEGMENT == 0
    shift = torch.zeros_like(totals.total) if shift is None else shift
    width, step = (_SEGMENT, _compiled()) if fused else (keys, _products)
    # One row for each segment, so that the number of rows is all that differs between blocks.
    shifts = shift.expand(-1, -1, keys // width).reshape(-1, 1)
    total, largest, score_total, *low = step(scores.view(-1, width), shifts, magnitudes.view(-1, width))
    totals.total.add_(total.view(heads, rows, -1).sum(-1, keepdim=True))
    totals.largest.copy_(torch.maximum(totals.largest, largest.view(heads, rows, -1).amax(-1, keepdim=True)))
    totals.score_total.add_(score_total.view(heads, rows, -1).sum(-1, keepdim=True))
    p, weighted, squared = (x.view(scores.shape) for x in low)
    return p, weighted, squared


def _exponentials(scores: Tensor, shift: Tensor | None) -> Tensor:
    return (scores if shift is None else scores.sub_(shift)).exp_()


def _products(scores: Tensor, shift: Tensor, magnitudes: Tensor) -> tuple[Tensor, ...]:
    """Of each row [m, width]: sum of p, largest p, sum of p·magnitude; then p, p·magnitude and p²."""
    p = _exponentials(scores, shift)
    low = p.to(magnitudes.dtype)
    weighted = magnitudes.mul_(low)
    return p.sum(-1), low.amax(-1), weighted.sum(-1, dtype=torch.float32), low, weighted, low.square()


@cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    """The products as one kernel for any number of rows, or as they stand where this machine has no compiler."""
    compiled = torch.compile(_products)
    scores, shift = torch.zeros(96, _SEGMENT, device="cuda"), torch.zeros(96, 1, device="cuda")
    operands = (scores.double(), shift.double(), scores.bfloat16())
    for operand in operands:
        torch._dynamo.mark_dynamic(operand, 0)
    try:
        compiled(*operands)
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return _products
    return compiled
