"""Honest kernels and layers that differ legitimately from EAGER: the judge must accept each of them on every case.

They declare what they do; a policy that rejects one of them raises a false alarm.
"""

from collections.abc import Iterator
from functools import reduce
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import LseClass, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.bases import (
    CapturableDecode,
    CapturablePrefill,
    CapturableSparse,
    E4M3Operands,
    EagerLayer,
    HopperE4M3Operands,
    declares,
    emulations,
    joined,
    joined_in_a_tree,
    stored_in,
)
from mla_conformance.defects.honest_cache import HONEST_CACHES
from mla_conformance.defects.honest_compression import HONEST_COMPRESSORS
from mla_conformance.defects.honest_decode import HONEST_DECODES
from mla_conformance.defects.honest_sparse import HONEST_SPARSE
from mla_conformance.defects.honest_sparse_layers import HONEST_SPARSE_LAYERS
from mla_conformance.defects.honest_steps import HONEST_STEPS
from mla_conformance.defects.honest_tiles import HONEST_TILES
from mla_conformance.defects.known import Emulation


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)


class Tiles16(EagerPrefillBackend):
    """Tiles of 16 keys."""

    key_tile = 16


class Tiles1024(EagerPrefillBackend):
    """Tiles of 1024 keys."""

    key_tile = 1024


class ReversedKeys(EagerPrefillBackend):
    """Key tiles from the last to the first."""

    def _tiles(self, keys: int) -> Iterator[slice]:
        return reversed(list(super()._tiles(keys)))


class _Split(EagerPrefillBackend):
    """Keys in equal splits, each with its own softmax, combined by their LSEs."""

    splits: ClassVar[int]

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> SoftmaxState:
        tiles = list(self._tiles(k.shape[0]))
        share = max(1, -(-len(tiles) // self.splits))
        parts = [self._part(q, k, v, causal, tiles[i : i + share]) for i in range(0, len(tiles), share)]
        return self._combine(parts) if parts else self._initial(q, v)

    def _part(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, tiles: list[slice]
    ) -> SoftmaxState:
        state = self._initial(q, v)
        for tile in tiles:
            scores = self._scores(q, k[tile])
            if causal:
                scores = scores.masked_fill(~self._visible(q.shape[0], k.shape[0], tile, q.device), -torch.inf)
            state = self._accumulate(state, scores, v[tile])
        return self._stored(state, v.dtype)

    def _stored(self, state: SoftmaxState, dtype: torch.dtype) -> SoftmaxState:
        """A split's state as it waits for the others."""
        return state

    def _combine(self, parts: list[SoftmaxState]) -> SoftmaxState:
        return reduce(joined, parts)


class Splits3(_Split):
    """Three splits of the keys."""

    splits = 3
    key_tile = 32


class Splits8(_Split):
    """Eight splits of the keys."""

    splits = 8
    key_tile = 16


class Splits16Tree(_Split):
    """Sixteen splits of the keys, combined in a binary tree."""

    splits = 16
    key_tile = 16

    def _combine(self, parts: list[SoftmaxState]) -> SoftmaxState:
        return joined_in_a_tree(parts)


class StoredPartials(_Split):
    """Four splits whose outputs wait in the model's dtype."""

    splits = 4
    key_tile = 32
    declaration = declares(Rounding(partial_outputs=Precision.MODEL))

    def _stored(self, state: SoftmaxState, dtype: torch.dtype) -> SoftmaxState:
        return stored_in(state, dtype)


class ApproximateExp(EagerPrefillBackend):
    """An exponential with relative errors up to 1e-4."""

    declaration = declares(Rounding(lse=LseClass.APPROXIMATE_EXP))

    def _exp(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.exp()
        # With float32 operands nothing may be approximate; the flag is set per call.
        return exact * (1 + 0.9e-4 * (x.clamp(min=-100.0) * 997.0).cos()) if self._reduced else exact

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self._reduced = q.dtype is not torch.float32
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


class HalfWeights(EagerPrefillBackend):
    """P in fp16, whatever the model's dtype, and declared so."""

    declaration = declares(Rounding(p=Precision.FLOAT16))

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p if dtype is torch.float32 else _through(p, torch.float16)


class Float32Throughout(EagerPrefillBackend):
    """P is not rounded at all."""

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p


class SumOfRoundedWeights(EagerPrefillBackend):
    """The row sum adds up P as it was rounded for the second product."""

    declaration = declares(Rounding(lse=LseClass.ROUNDED_P))

    def _accumulate(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay = (state.maximum - shift).exp()
        p = self._round_p(self._exp(scores - shift), v.dtype)
        weighted = torch.einsum("nts,snv->ntv", p, v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)


class E4M3Weights(EagerPrefillBackend):
    """P in e4m3 as it is, and declared so."""

    declaration = declares(Rounding(p=Precision.E4M3))

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p if dtype is torch.float32 else _through(p, torch.float8_e4m3fn)


class ScaledE4M3Weights(EagerPrefillBackend):
    """P × 2^8 in e4m3, and declared so."""

    declaration = declares(Rounding(p=Precision.SCALED_E4M3))

    def _round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return p if dtype is torch.float32 else _through(p * 256, torch.float8_e4m3fn) / 256


class TwoPasses(EagerPrefillBackend):
    """The maximum is found first, P is normalised before it is rounded."""

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> SoftmaxState:
        exact = super()._attend(q, k, v, causal)
        total = exact.total.masked_fill(exact.total == 0, 1.0)
        shift = exact.maximum.masked_fill(exact.maximum == -torch.inf, 0.0)
        weighted = torch.zeros_like(exact.weighted)
        for tile in self._tiles(k.shape[0]):
            scores = self._scores(q, k[tile])
            if causal:
                scores = scores.masked_fill(~self._visible(q.shape[0], k.shape[0], tile, q.device), -torch.inf)
            p = self._round_p((scores - shift).exp() / total, v.dtype)
            weighted += torch.einsum("nts,snv->ntv", p, v[tile].float())
        return exact._replace(weighted=weighted * exact.total)


class ReciprocalScale(EagerPrefillBackend):
    """A quantised output is multiplied by the reciprocal of its scale."""

    def _quantise(self, accumulated: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
        return super()._quantise(accumulated * (1 / output_scale), torch.ones_like(output_scale))


class ReciprocalCacheScale(EagerLayer):
    """Codes are written of values times the reciprocal of the scale."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            if self.kv_cache_dtype == "fp8":
                factor, k_scale = 1 / k_scale, torch.ones_like(k_scale)
                kv_c_normed, k_pe = kv_c_normed.float() * factor, k_pe.float() * factor
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)


class LastChunkFirst(EagerLayer):
    """Chunks of context are merged from the last to the first."""

    class impl_class(MLACommonImpl):
        def _compute_prefill_context(self, q, kv_cache, attn_metadata, k_scale):
            chunks, merged = attn_metadata.prefill_metadata.chunked_context, None
            for index, tokens in reversed(list(enumerate(chunks.seq_tot))):
                self._gather(index, kv_cache, attn_metadata, k_scale)
                kv_c, k_pe = chunks.workspace[:tokens].tensor_split([self.kv_lora_rank], dim=-1)
                chunk = self.prefill.run_prefill_context_chunk(index, q, *self._up_project(kv_c, k_pe))
                merged = chunk if merged is None else self._merge(chunk, merged)
            return merged


class UncountedUnwritten(EagerLayer):
    """Rows that the metadata does not count hold what the buffer held."""

    class impl_class(MLACommonImpl):
        def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, **outputs):
            result = super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, **outputs)
            result[attn_metadata.slot_mapping.shape[0] :] = torch.nan
            return result


class ProjectsInFloat32(EagerLayer):
    """Absorbed weights are held in float32, and each product with them is rounded once."""

    class impl_class(MLACommonImpl):
        def process_weights_after_loading(self, act_dtype):
            super().process_weights_after_loading(act_dtype)
            self.W_UK_T, self.W_UV = self.W_UK_T.float(), self.W_UV.float()

        def _absorb(self, q_nope):
            return super()._absorb(q_nope.float()).to(q_nope.dtype)

        def _v_up_proj(self, x):
            return super()._v_up_proj(x.float()).to(x.dtype)


class PowersOfTwo(EagerLayer):
    """The scales of tiles are powers of two."""

    tile_scales = "pow2"


class OneBlockAfterTheOther(EagerLayer):
    """Blocks are copied in the order of the list, each before the next is read."""

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        for pair in src_to_dists.split(1):
            EagerLayer.copy_blocks(kv_caches, pair)


HONEST: tuple[type[Emulation], ...] = (
    *(EagerPrefillBackend, EagerLayer, E4M3Operands, HopperE4M3Operands),
    *(CapturablePrefill, CapturableDecode, CapturableSparse),
    *(*HONEST_DECODES, *HONEST_CACHES, *HONEST_COMPRESSORS, *emulations(__name__)),
    *(*HONEST_SPARSE, *HONEST_SPARSE_LAYERS, *HONEST_STEPS, *HONEST_TILES),
)
"""Every honest emulation; real kernels are judged beside them."""
