"""From scores to weights: the exponential in float64, its sums, and the products that error terms are made of."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

Products = tuple[Tensor, Tensor, Tensor]
"""p, p·magnitude and p², each [h, r, c] in low precision."""


def weigh(scores: Tensor, totals: Tensor) -> None:
    """Turn scores [h, r, c] float64 into weights p = e^score in their place, and add Σ p to totals [h, r, 1]."""
    totals.add_(scores.exp_().sum(-1, keepdim=True))


def weigh_with_products(scores: Tensor, magnitudes: Tensor, totals: Tensor, largest: Tensor) -> Products:
    """The same with magnitudes [h, r, c], bounds of the scores in low precision, which are overwritten.

    totals: [h, r, 2] float64, Σ p and Σ p·magnitude. largest: [h, r, 1] float32, the largest p so far.

    As separate operations this moves 44 bytes an element of a GPU's memory, as one kernel 24. That one serves bfloat16
    only, which large problems are given, since it takes a second to compile.
    """
    kernel = _kernel() if magnitudes.dtype == torch.bfloat16 and scores.is_cuda else None
    if kernel is not None:
        return kernel(scores, magnitudes, totals, largest)
    low = scores.exp_().to(magnitudes.dtype)
    weighted = magnitudes.mul_(low)
    totals.add_(torch.stack((scores.sum(-1), weighted.sum(-1, dtype=torch.float64)), dim=-1))
    torch.maximum(largest, low.amax(-1, keepdim=True), out=largest)
    return low, weighted, low.square()


@cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], Products] | None:
    """The kernel, tried once; None where there is no Triton, or nothing that it compiles with."""
    if find_spec("triton") is None:
        return None
    scores, sums = torch.zeros(1, 1, 1, device="cuda"), torch.zeros(1, 1, 2, device="cuda")
    try:
        from mla_conformance.reference.gpu_weights import weigh_on_gpu

        weigh_on_gpu(scores.double(), scores.bfloat16(), sums.double(), sums[..., :1])
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return None
    return weigh_on_gpu
