"""Honest kernels and layers that differ legitimately from EAGER: the judge must accept each of them on every case.

They declare what they do; a policy that rejects one of them raises a false alarm.
"""

from collections.abc import Iterator
from functools import reduce
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import LseClass, Precision, Rounding
from mla_conformance.backends.eager import EagerPrefillBackend, SoftmaxState
from mla_conformance.backends.eager_sparse_layer import EagerSparseLayerBackend
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
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
from mla_conformance.defects.honest_cache import HONEST_CACHES, HONEST_COMPRESSORS
from mla_conformance.defects.honest_decode import HONEST_DECODES
from mla_conformance.defects.honest_sparse import HONEST_SPARSE
from mla_conformance.defects.honest_steps import HONEST_STEPS
from mla_conformance.defects.honest_tiles import HONEST_TILES
from mla_conformance.defects.known import Emulation, but, kernels


def _through(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).to(x.dtype)


@kernels()
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

    @but(splits=3, key_tile=32)
    class splits3:
        """Three splits of the keys."""

    @but(splits=8, key_tile=16)
    class splits8:
        """Eight splits of the keys."""

    @but(splits=16, key_tile=16)
    def splits16_tree__combine(self, parts: list[SoftmaxState]) -> SoftmaxState:
        """Sixteen splits of the keys, combined in a binary tree."""
        return joined_in_a_tree(parts)

    @but(splits=4, key_tile=32, declaration=declares(Rounding(partial_outputs=Precision.MODEL)))
    def stored_partials__stored(self, state: SoftmaxState, dtype: torch.dtype) -> SoftmaxState:
        """Four splits whose outputs wait in the model's dtype."""
        return stored_in(state, dtype)


@kernels()
class _Prefill(EagerPrefillBackend):
    @but(key_tile=16)
    class tiles16:
        """Tiles of 16 keys."""

    @but(key_tile=1024)
    class tiles1024:
        """Tiles of 1024 keys."""

    def reversed_keys__tiles(self, keys: int) -> Iterator[slice]:
        """Key tiles from the last to the first."""
        return reversed(list(super()._tiles(keys)))

    class approximate_exp:
        """An exponential with relative errors up to 1e-4."""

        declaration = declares(Rounding(lse=LseClass.APPROXIMATE_EXP))

        def _exp(self, x: torch.Tensor) -> torch.Tensor:
            exact = x.exp()
            # With float32 operands nothing may be approximate; the flag is set per call.
            return exact * (1 + 0.9e-4 * (x.clamp(min=-100.0) * 997.0).cos()) if self._reduced else exact

        def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
            self._reduced = q.dtype is not torch.float32
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    @but(declaration=declares(Rounding(p=Precision.FLOAT16)))
    def half_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P in fp16, whatever the model's dtype, and declared so."""
        return p if dtype is torch.float32 else _through(p, torch.float16)

    def float32_throughout__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P is not rounded at all."""
        return p

    @but("accumulate", declaration=declares(Rounding(lse=LseClass.ROUNDED_P)))
    def sum_of_rounded_weights(self, state: SoftmaxState, scores: torch.Tensor, v: torch.Tensor) -> SoftmaxState:
        """The row sum adds up P as it was rounded for the second product."""
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
        decay = (state.maximum - shift).exp()
        p = self._round_p(self._exp(scores - shift), v.dtype)
        weighted = torch.einsum("nts,snv->ntv", p, v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)

    @but(declaration=declares(Rounding(p=Precision.E4M3)))
    def e4_m3_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P in e4m3 as it is, and declared so."""
        return p if dtype is torch.float32 else _through(p, torch.float8_e4m3fn)

    @but(declaration=declares(Rounding(p=Precision.SCALED_E4M3)))
    def scaled_e4_m3_weights__round_p(self, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """P × 2^8 in e4m3, and declared so."""
        return p if dtype is torch.float32 else _through(p * 256, torch.float8_e4m3fn) / 256

    def two_passes__behind_attend(self, exact, *, q, k, v, causal):
        """The maximum is found first, P is normalised before it is rounded."""
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

    def reciprocal_scale__quantise(self, accumulated: torch.Tensor, output_scale: torch.Tensor) -> torch.Tensor:
        """A quantised output is multiplied by the reciprocal of its scale."""
        return super()._quantise(accumulated * (1 / output_scale), torch.ones_like(output_scale))


@kernels((EagerLayer, "impl_class"))
class _Impl(MLACommonImpl):
    def reciprocal_cache_scale__do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
        """Codes are written of values times the reciprocal of the scale."""
        if self.kv_cache_dtype == "fp8":
            factor, k_scale = 1 / k_scale, torch.ones_like(k_scale)
            kv_c_normed, k_pe = kv_c_normed.float() * factor, k_pe.float() * factor
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)

    def last_chunk_first__compute_prefill_context(self, q, kv_cache, attn_metadata, k_scale):
        """Chunks of context are merged from the last to the first."""
        chunks, merged = attn_metadata.prefill_metadata.chunked_context, None
        for index, tokens in reversed(list(enumerate(chunks.seq_tot))):
            self._gather(index, kv_cache, attn_metadata, k_scale)
            kv_c, k_pe = chunks.workspace[:tokens].tensor_split([self.kv_lora_rank], dim=-1)
            chunk = self.prefill.run_prefill_context_chunk(index, q, *self._up_project(kv_c, k_pe))
            merged = chunk if merged is None else self._merge(chunk, merged)
        return merged

    def uncounted_unwritten__behind_forward(self, result, *, attn_metadata):
        """Rows that the metadata does not count hold what the buffer held."""
        result[attn_metadata.slot_mapping.shape[0] :] = torch.nan


@kernels()
class _Layer(EagerLayer):
    class projects_in_float32:
        """Absorbed weights are held in float32, and each product with them is rounded once."""

        class impl_class(MLACommonImpl):
            def process_weights_after_loading(self, act_dtype):
                super().process_weights_after_loading(act_dtype)
                self.W_UK_T, self.W_UV = self.W_UK_T.float(), self.W_UV.float()

            def _absorb(self, q_nope):
                return super()._absorb(q_nope.float()).to(q_nope.dtype)

            def _v_up_proj(self, x):
                return super()._v_up_proj(x.float()).to(x.dtype)

    @but(tile_scales="pow2")
    class powers_of_two:
        """The scales of tiles are powers of two."""

    @staticmethod
    def one_block_after_the_other__copy_blocks(kv_caches, src_to_dists):
        """Blocks are copied in the order of the list, each before the next is read."""
        for pair in src_to_dists.split(1):
            EagerLayer.copy_blocks(kv_caches, pair)


HONEST: tuple[type[Emulation], ...] = (
    *(EagerPrefillBackend, EagerLayer, E4M3Operands, HopperE4M3Operands),
    *(CapturablePrefill, CapturableDecode, CapturableSparse),
    *(*HONEST_DECODES, *HONEST_CACHES, *HONEST_COMPRESSORS, *emulations(__name__)),
    *(*HONEST_SPARSE, EagerSparseLayerBackend, *HONEST_STEPS, *HONEST_TILES),
)
"""Every honest emulation; real kernels are judged beside them."""
