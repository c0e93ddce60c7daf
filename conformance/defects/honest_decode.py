"""Honest decode kernels that differ legitimately from EAGER: the judge must accept every one of them on every case."""

import math
from collections.abc import Iterator, Sequence

import torch

from mla_conformance.backends.declaration import Declaration, LseClass, Precision, Rounding
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.split_keys import SplitDecode, joined

_LOG2_E = math.log2(math.e)


def _declares(rounding: Rounding) -> Declaration:
    return Declaration(rounding=rounding, emulated=True)


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)


class DecodeTiles16(EagerDecodeBackend):
    """Tiles of 16 keys."""

    key_tile = 16


class DecodeTiles1024(EagerDecodeBackend):
    """Tiles of 1024 keys."""

    key_tile = 1024


class DecodeReversedKeys(EagerDecodeBackend):
    """Key tiles from the last to the first."""

    def _tiles(self, keys: int) -> Iterator[slice]:
        return reversed(list(super()._tiles(keys)))


class DecodeSplits64(SplitDecode):
    """Splits of 64 keys, combined one after the other."""

    split = 64


class DecodeSplits16Tree(SplitDecode):
    """At most sixteen splits of the keys, combined in a binary tree."""

    def _share(self, seq_len: int) -> int:
        return max(1, -(-seq_len // 16))

    def _combine(self, parts: Sequence[SoftmaxState]) -> SoftmaxState:
        waiting = list(parts)
        while len(waiting) > 1:
            pairs = [joined(a, b) for a, b in zip(waiting[::2], waiting[1::2], strict=False)]
            waiting = pairs + waiting[len(pairs) * 2 :]
        return waiting[0]


class DecodeStoredPartials(SplitDecode):
    """Splits of 256 keys whose outputs wait in the model's dtype."""

    declaration = _declares(Rounding(partial_outputs=Precision.MODEL))

    def _part(self, state: SoftmaxState) -> SoftmaxState:
        total = state.total.masked_fill(state.total == 0, 1.0)
        return state._replace(weighted=_through(state.weighted / total, self._model_dtype) * state.total)


class DecodeKeysInModelDtype(EagerDecodeBackend):
    """Keys of a cache of codes are rounded to the model's dtype after dequantisation, and declared so."""

    declaration = _declares(Rounding(dequantised_keys=Precision.MODEL))

    def _dequantise(self, rows: torch.Tensor, k_scale: torch.Tensor) -> torch.Tensor:
        return _through(super()._dequantise(rows, k_scale), self._model_dtype)


class DecodeScaleOnScores(EagerDecodeBackend):
    """The scale of an fp8 cache multiplies scores and output instead of the codes."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_cache_dtype != "fp8":
            return super()._attend(q, request, seq_len, kv_cache, k_scale)
        self._factor = k_scale
        state = super()._attend(q, request, seq_len, kv_cache, torch.ones_like(k_scale))
        self._factor = 1.0
        return state._replace(weighted=state.weighted * k_scale)

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super()._scores(q, k) * getattr(self, "_factor", 1.0)


class DecodeHalfWeights(EagerDecodeBackend):
    """P in fp16, whatever the model's dtype, and declared so."""

    declaration = _declares(Rounding(p=Precision.FLOAT16))

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p if self._model_dtype is torch.float32 else _through(p, torch.float16)


class DecodeFloat32Throughout(EagerDecodeBackend):
    """P is not rounded at all."""

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p


class DecodeApproximateExp(EagerDecodeBackend):
    """An exponential with relative errors up to 1e-4, for 16-bit models."""

    declaration = _declares(Rounding(lse=LseClass.APPROXIMATE_EXP))

    def _exp(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.exp()
        if self._model_dtype is torch.float32:
            return exact
        return exact * (1 + 0.9e-4 * (x.clamp(min=-100.0) * 997.0).cos())


class DecodeBase2(EagerDecodeBackend):
    """Powers of two of scores times log2(e), the LSE converted at last."""

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super()._scores(q, k) * _LOG2_E

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay, p = (state.maximum - shift).exp2(), (scores - shift).exp2()
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)

    def _finish(self, state: SoftmaxState) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._finish(state._replace(maximum=state.maximum / _LOG2_E))


HONEST_DECODE: tuple[type[EagerDecodeBackend], ...] = (
    EagerDecodeBackend,
    DecodeTiles16,
    DecodeTiles1024,
    DecodeReversedKeys,
    DecodeSplits64,
    DecodeSplits16Tree,
    DecodeStoredPartials,
    DecodeKeysInModelDtype,
    DecodeScaleOnScores,
    DecodeHalfWeights,
    DecodeFloat32Throughout,
    DecodeApproximateExp,
    DecodeBase2,
)
"""Every honest emulation of a decode kernel."""
