"""From scores to weights, the sums over keys that attention is made of, tile by tile, and the state they end in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from mla_conformance.reference import attention, tiles

# Bound of a score less the shift: squares of weights, summed over a million keys, stay within float32's range.
LARGEST_EXPONENT = 32.0
LEAST_SUM = math.exp(-30.0)  # sums below it may have lost low-precision products to underflow
_NO_KEY = 1e-18  # stands for the Σ p of a row without keys; its square's inverse is within float32
Kernel = Callable[[tiles.Tile, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowSums:
    """Sums of weights p = e^(score - shift), heads first; the last three, float32, are what ErrorTerms are made of."""

    shift: Tensor  # [h, r, 1] float64
    output: Tensor  # [h, r, V] float64, Σ p·v
    totals: Tensor  # [h, r, 2] float64, Σ p and Σ p·magnitude
    products: Tensor  # [3h, r, V], magnitude, score and squares as in ErrorTerms
    absolute: Tensor  # [h, r, V], Σ |v| of the visible keys
    largest: Tensor  # [h, r, 1], the largest weight

    @staticmethod
    def zeros(shift: Tensor, width: int) -> "RowSums":
        heads, rows, _ = shift.shape
        shapes = (3 * heads, rows, width), (heads, rows, width), (heads, rows, 1)
        terms = (torch.zeros(shape, device=shift.device) for shape in shapes)
        return RowSums(shift, shift.new_zeros(heads, rows, width), shift.new_zeros(heads, rows, 2), *terms)

    def map(self, view: tiles.View) -> "RowSums":
        return RowSums(*map(view, vars(self).values()))

    def add(self, tile: tiles.Tile) -> None:
        """Add a tile's keys, but for Σ |v|, which takes no weights."""
        weights, tripled = self._weighed(tile)
        products, low_v = tripled.flatten(0, 1), tile.keys.low_v
        if products.is_cuda:  # without rounding what is added to the operands' dtype
            torch.baddbmm(self.products, products, low_v, out_dtype=self.products.dtype, out=self.products)
        else:
            self.products.add_(products @ low_v)
        self.output.baddbmm_(weights, tile.keys.v)

    def _weighed(self, tile: tiles.Tile) -> tuple[Tensor, Tensor]:
        """[h, r, c] float64, the weights p; and products [3, h, r, c] in low precision: p, p·magnitude and p².

        Adds to totals and largest. On a GPU one kernel moves 16 bytes an element, these lines 88; it serves bfloat16
        only, which large problems are given, since it takes seconds to compile.
        """
        products, queries, k = tile.products(), tile.queries, tile.keys.k
        if k.is_cuda and products.dtype == torch.bfloat16:
            kernel = _kernel(k.shape[2], queries.wide.dtype, k.dtype)
            if kernel is not None:
                return kernel(tile, self.shift, self.totals, self.largest, products), products
        low, weighted, squared = products
        weights = tile.scores().sub_(self.shift).exp_()
        self.totals[..., 0].add_(weights.sum(-1))
        low.copy_(weights)
        weighted.mul_(low)
        torch.square(low, out=squared)
        self.totals[..., 1].add_(weighted.sum(-1, dtype=torch.float64))
        torch.maximum(self.largest, low.amax(-1, keepdim=True), out=self.largest)
        return weights, products

    def extremes(self) -> Tensor:
        """[2] float64: the least Σ p of a row, and the largest sum of the error terms, not finite beyond its range."""
        return torch.stack((self.totals[..., 0].amin(), self.products.amax().double()))


def empty_state(rows: int, heads: int, width: int, device: torch.device) -> attention.AttentionState:
    """A state of T rows, N heads and V = ``width`` columns to store sums in; its error terms are float32."""
    shapes = [(rows, heads, width)] * 4 + [(heads, rows)]
    terms = attention.ErrorTerms(*(torch.empty(shape, device=device) for shape in shapes))
    output = torch.empty(shapes[0], dtype=torch.float64, device=device)
    return attention.AttentionState(output, output.new_empty(shapes[-1]), terms)


def store(sums: RowSums, low: torch.dtype, state: attention.AttentionState) -> None:
    """Write the state that the sums end in; low: the precision of the error terms' products; state: r rows, h heads."""
    assert state.terms is not None
    # Terms must not be too small for the rounding of their products, six times by half an eps.
    margin = 1.0 + 3 * torch.finfo(low).eps
    total = sums.totals[..., :1]
    inverse = total.clamp(min=_NO_KEY).reciprocal_()
    torch.mul(sums.output, inverse, out=state.output.transpose(0, 1))
    state.lse.copy_((total.log() + sums.shift).squeeze(-1))
    factor = (inverse * margin).float()
    magnitude, score, squares = sums.products.unflatten(0, (3, -1))
    for term, factor_of_row, target in (
        (magnitude, factor, state.terms.magnitude),
        (score, factor, state.terms.score),
        (squares, (inverse.square() * margin).float(), state.terms.squares),
        (sums.absolute, sums.largest * factor, state.terms.peak),
    ):
        torch.mul(term, factor_of_row, out=target.transpose(0, 1))
    state.terms.lse_score.copy_((sums.totals[..., 1:] * inverse * margin).squeeze(-1))


@cache
def _kernel(width: int, query: torch.dtype, key: torch.dtype) -> Kernel | None:
    """The kernel, tried once; None where there is no Triton, nothing that it compiles with, or an odd width."""
    if find_spec("triton") is None:
        return None
    from mla_conformance.reference.gpu_weights import STEP, weigh_on_gpu

    if width % STEP:
        return None
    try:
        # On a tile in the form that every large problem has along its edge.
        q, k = (torch.zeros(1, 64, width, dtype=dtype, device="cuda") for dtype in (query, key))
        queries = tiles.Queries(q, None if query == torch.float64 else q[0, 0, 0].double(), q)
        tile = tiles.Tile(queries, tiles.TileKeys(k, k, k, k), torch.zeros(64, dtype=torch.long, device="cuda"))
        shift, totals = (torch.zeros(1, 64, columns, dtype=torch.float64, device="cuda") for columns in (1, 2))
        weigh_on_gpu(tile, shift, totals, shift.float(), torch.zeros(3, 1, 64, 64, dtype=torch.bfloat16, device="cuda"))
    except Exception:  # a missing compiler shows as any of many exceptions, and costs time only
        return None
    return weigh_on_gpu


def norms(x: Tensor, order: int = 2, dim: int = -1) -> Tensor:
    """Lengths of rows of any float dtype in float32, of float64 in float64: [tokens, N] of [tokens, N, columns]."""
    if x.dtype.itemsize == 1:
        x = x.to(torch.bfloat16)  # exact, and the norm knows no float8
    return torch.linalg.vector_norm(x, ord=order, dim=dim, dtype=torch.promote_types(x.dtype, torch.float32))
