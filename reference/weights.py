"""From scores to weights: the exponential in float64, and the low-precision products that error terms are made of.

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


@dataclass(frozen=True)
class Weights:
    """Weights of a block of h heads, r queries and c keys, relative to e^shift.

    Attributes:
        p: [h, r, c] float64.
        total: [h, r, 1] float64, sum of p.
        low: p, p·magnitude and p², each [h, r, c] in low precision; None where no magnitudes were given.
        score_total: [h, r, 1] float32, sum of p·magnitude.
        largest: [h, r, 1] in low precision, largest p.
    """

    p: Tensor
    total: Tensor
    low: tuple[Tensor, Tensor, Tensor] | None = None
    score_total: Tensor | None = None
    largest: Tensor | None = None


def weigh(scores: Tensor, shift: Tensor | None, magnitudes: Tensor | None) -> Weights:
    """Weights exp(scores - shift) of scores [h, r, c] float64, in the memory of the scores.

    shift: [h, r, 1] float64, or None for 0. magnitudes: [h, r, c], bounds of the scores in low precision, overwritten.
    """
    if magnitudes is None:
        p = _exponentials(scores, shift)
        return Weights(p, p.sum(-1, keepdim=True))
    parts, step = _parts(scores)
    total, largest, score_total, *low = step(
        scores.view(parts), None if shift is None else shift.unsqueeze(-1), magnitudes.view(parts)
    )
    p, weighted, squared = (x.view(scores.shape) for x in low)
    return Weights(
        p=scores,
        total=total.sum(-1, keepdim=True),
        low=(p, weighted, squared),
        score_total=score_total.sum(-1, keepdim=True),
        largest=largest.amax(-1, keepdim=True),
    )


def _parts(scores: Tensor) -> tuple[tuple[int, ...], Callable[..., tuple[Tensor, ...]]]:
    """The shape [h, r, parts, width] in which the products are made, and what makes them."""
    heads, rows, keys = scores.shape
    if scores.is_cuda and scores.numel() >= _COMPILED_ELEMENTS and keys % _SEGMENT == 0:
        return (heads, rows, keys // _SEGMENT, _SEGMENT), _compiled()
    return (heads, rows, 1, keys), _products


def _exponentials(scores: Tensor, shift: Tensor | None) -> Tensor:
    return (scores if shift is None else scores.sub_(shift)).exp_()


def _products(scores: Tensor, shift: Tensor | None, magnitudes: Tensor) -> tuple[Tensor, ...]:
    """Sum of p, largest p, sum of p·magnitude; then p, p·magnitude and p² in the precision of the magnitudes."""
    p = _exponentials(scores, shift)
    low = p.to(magnitudes.dtype)
    weighted = magnitudes.mul_(low)
    return p.sum(-1), low.amax(-1), weighted.sum(-1, dtype=torch.float32), low, weighted, low.square()


@cache
def _compiled() -> Callable[..., tuple[Tensor, ...]]:
    """The same as one kernel, or as it stands where this machine has no compiler for it."""
    compiled = torch.compile(_products)
    try:
        probe = torch.zeros(2, 2, 2, _SEGMENT, device="cuda")
        compiled(probe.double(), None, probe.bfloat16())
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return _products
    return compiled
