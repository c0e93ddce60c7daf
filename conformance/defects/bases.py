"""What wrong and honest kernels are made from: EAGER in a layer, a graph, splits or e4m3, and scales in e8m0."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Declaration, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend, OnlineSoftmax, SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.eager_sparse import EagerSparseBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.layer.mla_layer import MLACommonBackend
from mla_conformance.judging.tolerance import SCALED_P


class LayeredDecode(EagerDecodeBackend):
    """EAGER's decode beside its prefill."""

    prefill_backend: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend


class EagerLayer(MLACommonBackend):
    """Prefill and decode as EAGER computes them; a subclass replaces a step of the layer around them."""

    prefill_backend = EagerPrefillBackend
    decode_backend = EagerDecodeBackend
    supported_dtypes = EagerDecodeBackend.supported_dtypes
    supported_kv_cache_dtypes = EagerDecodeBackend.supported_kv_cache_dtypes


def emulations(module: str) -> tuple[Any, ...]:
    """The classes that a module defines, in their order, but for those whose names begin with an underscore."""
    defined = (each for each in vars(sys.modules[module]).values() if getattr(each, "__module__", "") == module)
    return tuple(each for each in defined if isinstance(each, type) and not each.__name__.startswith("_"))


class CapturablePrefill(EagerPrefillBackend):
    """Prefills over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class CapturableDecode(EagerDecodeBackend):
    """Decodes over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


class CapturableSparse(EagerSparseBackend):
    """Attention to selected keys over a graph's buffers."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS


def joined(a: SoftmaxState, b: SoftmaxState) -> SoftmaxState:
    """The state of two splits together."""
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    wa, wb = (a.maximum - shift).exp(), (b.maximum - shift).exp()
    return SoftmaxState(maximum, a.total * wa + b.total * wb, a.weighted * wa + b.weighted * wb)


def joined_in_a_tree(parts: Sequence[SoftmaxState]) -> SoftmaxState:
    """The state of all splits together, joined by twos."""
    waiting = list(parts)
    while len(waiting) > 1:
        pairs = [joined(a, b) for a, b in zip(waiting[::2], waiting[1::2], strict=False)]
        waiting = pairs + waiting[len(pairs) * 2 :]
    return waiting[0]


def stored_in(state: SoftmaxState, dtype: torch.dtype) -> SoftmaxState:
    """A split's state whose output has waited for the others in ``dtype``."""
    total = state.total.masked_fill(state.total == 0, 1.0)
    return state._replace(weighted=(state.weighted / total).to(dtype).float() * state.total)


def through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` rounded to ``dtype`` and back."""
    return x.to(dtype).to(x.dtype)


def packed(kv_cache: torch.Tensor) -> torch.Tensor:
    """A cache [blocks, page, width] as it would be read if no other page lay between its blocks."""
    _, page, width = kv_cache.shape
    return kv_cache.as_strided(kv_cache.shape, (page * width, width, 1), kv_cache.storage_offset())


def declares(rounding: Rounding) -> Declaration:
    """What an emulation declares that rounds so."""
    return Declaration(rounding=rounding, emulated=True)


LOG2_E = math.log2(math.e)


class BaseTwo(OnlineSoftmax):
    """Powers of two of scores times log2(e); the LSE is converted at last."""

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super()._scores(q, k) * LOG2_E

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp2(), (scores - shift).exp2()
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)

    def _finish(self, state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._finish(state._replace(maximum=state.maximum / LOG2_E))


class SplitDecode(LayeredDecode):
    """Splits of ``split`` keys each."""

    key_tile = 32
    split = 256

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        ends = [*self._starts(seq_len), seq_len]
        spans = list(map(slice, ends, ends[1:]))
        parts = [self._over(self._within(span), q, request, seq_len, kv_cache, k_scale) for span in spans]
        return self._combine(list(map(self._part, parts))) if parts else self._initial(q, q[..., : self.kv_lora_rank])

    def _within(self, span: slice) -> Iterator[slice]:
        for start in range(span.start, span.stop, self.key_tile):
            yield slice(start, min(start + self.key_tile, span.stop))

    def _starts(self, seq_len: int) -> Iterable[int]:
        return range(0, seq_len, self._share(seq_len))

    def _share(self, seq_len: int) -> int:
        return self.split

    def _part(self, state: SoftmaxState) -> SoftmaxState:
        """A split's state as it waits for the others."""
        return state

    def _combine(self, parts: Sequence[SoftmaxState]) -> SoftmaxState:
        return reduce(joined, parts)


_PRODUCTS = 32  # products of 8-bit operands that Hopper's tensor cores add at a time
_BITS = 13
_LEAST = -126  # of float32's powers of two, the least that is no subnormal: a unit below it would be 0


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
        unit = torch.exp2((exponent - 1 - _BITS).clamp(min=_LEAST).float())
        total = ((terms / unit).trunc() * unit).sum(dim=2)
    return total


V32_SCALES = slice(512, 528)  # bytes of the float32 scales in an entry of ``fp8_ds_mla``


def through_e8m0(rows: torch.Tensor) -> torch.Tensor:
    """Entries [..., 656] whose scales are the nearest powers of two."""
    rounded = rows.clone()
    scales = rows[..., V32_SCALES].contiguous().view(torch.float32)
    rounded[..., V32_SCALES] = scales.log2().round().exp2().view(torch.uint8)
    return rounded
