"""From scores to weights: the exponential in float64, its sums, and the products that error terms are made of."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from mla_conformance.reference.tiles import Keys, Queries, Tile

Kernel = Callable[[Tile, Tensor | None, Tensor, Tensor, Tensor], Tensor]


def weigh(tile: Tile, shift: Tensor | None, totals: Tensor) -> Tensor:
    """[h, r, c] float64, the weights p = e^(score - shift) of a tile; adds Σ p to totals [h, r, 1].

    shift: [h, r, 1] float64, or None for 0.
    """
    scores = tile.scores()
    weights = (scores if shift is None else scores.sub_(shift)).exp_()
    totals.add_(weights.sum(-1, keepdim=True))
    return weights


def weigh_with_products(tile: Tile, shift: Tensor | None, totals: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and products [3, h, r, c] in low precision: p, p·magnitude and p², for the magnitudes of the scores.

    totals: [h, r, 2] float64, Σ p and Σ p·magnitude. largest: [h, r, 1] float32, the largest p so far.

    As separate operations this moves 88 bytes an element of a GPU's memory, as one kernel 16. That one serves bfloat16
    only, which large problems are given, since it takes seconds to compile.
    """
    products = tile.products()
    kernel = _kernel_for(tile)
    if kernel is not None:
        return kernel(tile, shift, totals, largest, products), products
    low, weighted, squared = products
    weights = weigh(tile, shift, totals[..., :1])
    low.copy_(weights)
    weighted.mul_(low)
    torch.square(low, out=squared)
    totals[..., 1].add_(weighted.sum(-1, dtype=torch.float64))
    torch.maximum(largest, low.amax(-1, keepdim=True), out=largest)
    return weights, products


def _kernel_for(tile: Tile) -> Kernel | None:
    queries, k = tile.queries, tile.keys.k
    if not k.is_cuda or queries.low is None or queries.low.dtype != torch.bfloat16:
        return None
    return _kernel(k.shape[2], queries.wide.dtype, k.dtype)


@cache
def _kernel(width: int, query: torch.dtype, key: torch.dtype) -> Kernel | None:
    """The kernel, tried once; None where there is no Triton, nothing that it compiles with, or an odd width."""
    if find_spec("triton") is None:
        return None
    from mla_conformance.reference.gpu_weights import STEP, weigh_on_gpu

    if width % STEP:
        return None
    try:
        shift, totals = (torch.zeros(1, 64, columns, dtype=torch.float64, device="cuda") for columns in (1, 2))
        products = torch.zeros(3, 1, 64, 64, dtype=torch.bfloat16, device="cuda")
        weigh_on_gpu(_zeros(width, query, key), shift, totals, shift.float(), products)
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return None
    return weigh_on_gpu


def _zeros(width: int, query: torch.dtype, key: torch.dtype) -> Tile:
    """A tile to try the kernel on, in the form that every large problem has along its edge."""
    q, k = (torch.zeros(1, 64, width, dtype=dtype, device="cuda") for dtype in (query, key))
    factor = None if query == torch.float64 else q[0, 0, 0].double()
    return Tile(Queries(q, factor, None), Keys(k, k, None), torch.zeros(64, dtype=torch.long, device="cuda"))
