"""Kernels on operands in e4m3, as GPUs compute: P in e4m3 too, and on Hopper sums that keep 13 bits behind the point.

With operands of any other dtype they are EAGER.
"""

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.judging.tolerance import SCALED_P

_PRODUCTS = 32
"""Products of 8-bit operands that Hopper's tensor cores add at a time."""
_BITS = 13


class E4M3Operands(EagerPrefillBackend):
    """P × 2^8 in e4m3 where the operands are, sums in float32, and declared so."""

    declaration = Declaration(e4m3_rounding=Rounding(p=Precision.SCALED_E4M3), emulated=True)

    def _batch(self, q, *operands, **options):
        self._narrow = q.dtype == torch.float8_e4m3fn
        return super()._batch(q, *operands, **options)

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._narrow:
            return super()._round_p(p, dtype)
        return (p * SCALED_P).to(torch.float8_e4m3fn).float() / SCALED_P


class HopperE4M3Operands(E4M3Operands):
    """P × 2^8 in e4m3 and both products in Hopper's tensor cores where the operands are e4m3, and declared so."""

    declaration = Declaration(
        e4m3_rounding=Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22), emulated=True
    )

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if not self._narrow:
            return super()._scores(q, k)
        empty = q.new_zeros(self.num_heads, q.shape[0], k.shape[0], dtype=torch.float32)
        return added(empty, q.float().transpose(0, 1), k.float().permute(1, 2, 0)) * self.scale

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        exact = super()._accumulate(state, scores, v)
        if not self._narrow:
            return exact
        shift = exact.maximum.masked_fill(exact.maximum == -torch.inf, 0.0)
        p = self._round_p(self._exp(scores - shift), v.dtype)
        before = state.weighted * (state.maximum - shift).exp()
        return exact._replace(weighted=added(before, p, v.float().transpose(0, 1)))


def added(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``total`` [N, T, C] plus a [N, T, K] times b [N, K, C], 32 products at a time.

    Of each step's products and of the sum so far, what lies below 2^-13 of the largest one's power of two is cut off.
    """
    for first in range(0, a.shape[2], _PRODUCTS):
        step = slice(first, first + _PRODUCTS)
        terms = torch.cat([total[:, :, None], a[:, :, step, None] * b[:, None, step]], dim=2)
        _, exponent = terms.abs().amax(dim=2, keepdim=True).frexp()
        unit = torch.exp2((exponent - 1 - _BITS).float())
        total = ((terms / unit).trunc() * unit).sum(dim=2)
    return total
