"""Honest layers that differ legitimately from the common one: the judge must accept every one of them."""

import torch

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.eager_layer import EagerLayer


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


HONEST_LAYERS: tuple[type[EagerLayer], ...] = (
    EagerLayer,
    ReciprocalCacheScale,
    LastChunkFirst,
    UncountedUnwritten,
    ProjectsInFloat32,
    OneBlockAfterTheOther,
    PowersOfTwo,
)
"""Every honest layer."""
