"""Wrong layers where batches, caches, ranks and calls of certain kinds meet; each fact alone is served."""

import torch

from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer, packed
from mla_conformance.defects.known import known_defect

_LATENT_TILE = 128


@known_defect("layer-codes-of-later-chunks-unscaled", killed_by="mixed_batch")
class LaterChunksUnscaled(EagerLayer):
    """From the second chunk of a context on, codes are gathered without their scale."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            super()._gather(index, kv_cache, attn_metadata, torch.ones_like(k_scale) if index else k_scale)


@known_defect("layer-given-output-lacks-decodes-beside-prefills", killed_by="mixed_batch")
class GivenOutputLacksDecodes(EagerLayer):
    """Of a mixed batch, only the prefills' rows reach an output that was handed in."""

    class impl_class(MLACommonImpl):
        def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=None):
            result = super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
            if output is not None and attn_metadata.num_prefills:
                output[attn_metadata.decode_tokens] = 0.0
            return result


@known_defect("layer-single-pages-of-codes-written-unscaled", killed_by="layer_combinations")
class SinglePagesUnscaled(EagerLayer):
    """Codes are written to pages of one token without their scale."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            scale = torch.ones_like(k_scale) if kv_cache.shape[1] == 1 else k_scale
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, scale)


@known_defect("layer-slot-in-fifteen-bits", killed_by="cache_write")
class SlotInFifteenBits(EagerLayer):
    """Slots that are written are signed numbers of two bytes, too few for many large pages."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            slots = torch.where(slot_mapping < 0, slot_mapping, slot_mapping & 0x7FFF)
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slots, k_scale)


@known_defect("layer-mixed-entries-written-as-if-packed", killed_by="layer_combinations")
class MixedEntriesPacked(EagerLayer):
    """Mixed entries of a buffer that layers share are written as if its blocks stood one behind the other."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            written = packed(kv_cache) if self.kv_cache_dtype == "fp8_ds_mla" else kv_cache
            super().do_kv_cache_update(kv_c_normed, k_pe, written, slot_mapping, k_scale)


@known_defect("layer-tile-of-zeros-in-mixed-entries-nan", killed_by="cache_write")
class TileOfZeros(EagerLayer):
    """A tile of zeros has the scale 0 in a mixed entry, and 0 / 0 is written."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            if self.kv_cache_dtype == "fp8_ds_mla":
                tiles = kv_c_normed.unflatten(-1, (-1, _LATENT_TILE))
                empty = (tiles == 0).all(dim=-1, keepdim=True)
                kv_c_normed = tiles.masked_fill(empty, torch.nan).flatten(-2)
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)


@known_defect("layer-padded-batch-loses-last-of-several-tokens", killed_by="layer_combinations")
class PaddedLosesTheLast(EagerLayer):
    """In a batch with rows of padding, a decode of several query tokens loses its last."""

    class impl_class(MLACommonImpl):
        def forward(self, layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output=None):
            result = super().forward(layer, q, k_c_normed, k_pe, kv_cache, attn_metadata, output)
            if 0 in attn_metadata.seq_lens and attn_metadata.max_decode_query_len > 1:
                decodes = attn_metadata.decode_requests
                several = attn_metadata.query_lens_cpu[decodes] > 1
                result[(attn_metadata.query_start_loc[1:][decodes] - 1)[several].long()] = 0.0
            return result


class _KnowsTokens(MLACommonImpl):
    """Knows whether a decode of the batch has several query tokens."""

    def _absorbed_decode(self, q, kv_cache, attn_metadata, k_scale):
        self._several = attn_metadata.max_decode_query_len > 1
        return super()._absorbed_decode(q, kv_cache, attn_metadata, k_scale)


@known_defect("layer-tail-of-heads-projected-as-one-with-several-tokens", killed_by="layer_combinations")
class TailOfHeads(EagerLayer):
    """With several query tokens, heads behind whole tiles of 16 are projected with the weights of the first of them."""

    class impl_class(_KnowsTokens):
        def _v_up_proj(self, x):
            whole, exact = self.num_heads // 16 * 16, self.W_UV
            if self._several and whole:
                self.W_UV = exact[torch.arange(self.num_heads, device=exact.device).clamp(max=whole)]
            projected = super()._v_up_proj(x)
            self.W_UV = exact
            return projected


@known_defect("layer-ranks-behind-eight-lost-with-several-tokens", killed_by="layer_dcp")
class EightRanks(EagerLayer):
    """With several query tokens, what ranks behind the eighth hold is left out."""

    class impl_class(_KnowsTokens):
        def _merge_over_ranks(self, output, lse):
            if self._several and self.dcp_rank >= 8:
                output, lse = torch.zeros_like(output), torch.full_like(lse, -torch.inf)
            return super()._merge_over_ranks(output, lse)


@known_defect("layer-chunks-without-keys-merged-into-nan", killed_by="mixed_batch")
class ChunksWithoutKeys(EagerLayer):
    """A request without context is NaN once two chunks of the others' context were merged: exp(-inf - -inf)."""

    class impl_class(MLACommonImpl):
        def _merge(self, prefix, suffix):
            output, lse = super()._merge(prefix, suffix)
            empty = lse == -torch.inf
            return output.masked_fill(empty.mT.unsqueeze(-1), torch.nan), lse.masked_fill(empty, torch.nan)


@known_defect("layer-context-of-prefills-behind-decodes-from-first-rows", killed_by="mixed_batch")
class TableOfTheDecodes(EagerLayer):
    """Context of prefills that stand behind decodes is gathered by the first rows of the block table."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            metadata = attn_metadata.prefill_metadata
            own, metadata.block_table = metadata.block_table, attn_metadata.block_tables[: attn_metadata.num_prefills]
            super()._gather(index, kv_cache, attn_metadata, k_scale)
            metadata.block_table = own
