"""A layer that writes to its paged cache, or gathers from it, what it should not; metadata of another batch."""

from dataclasses import fields, replace

import torch

from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.defects.known import known_defect
from mla_conformance.reference.quantization import E4M3_MAX

_FLOOR = 1e-4
_WRITTEN_AT_ONCE = 256


@known_defect("mla-kv-spec-quant-mode-none-size-mismatch", killed_by="cache_write")
class SizedAsPlain(EagerLayer):
    """The cache is sized for L + R elements a token whatever its layout, also where an entry has 656 bytes."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, block_size, head_size


@known_defect("writer-overwrites-reserved-slot0", killed_by="cache_write")
class PaddingInSlot0(EagerLayer):
    """Rows of padding are written to slot 0."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping.clamp(min=0), k_scale)


@known_defect("slot-minus1-divided-writes-below-base", killed_by="cache_write")
class SlotBelowTheBase(EagerLayer):
    """Slot -1 is divided into page and offset as any other, and the write lands beside the pages of the batch."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            slots = slot_mapping % (kv_cache.shape[0] * kv_cache.shape[1])
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slots, k_scale)


@known_defect("mixed-chunk-slot-count-shorter-than-rows", killed_by="cache_write")
class SlotForEveryRow(EagerLayer):
    """Every row of the keys is written, and those behind the last slot take theirs from what lies behind it."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            behind = slot_mapping.new_full((len(kv_c_normed) - len(slot_mapping),), kv_cache.shape[1])
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, torch.cat((slot_mapping, behind)), k_scale)


@known_defect("dcp-fp8-context-gather-dtype-crash", killed_by="mixed_batch")
class ScaleOfTheContextLost(EagerLayer):
    """Context is gathered from a cache of codes without its scale."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            super()._gather(index, kv_cache, attn_metadata, torch.ones_like(k_scale))


@known_defect("scalar-kv-scale-indexed-per-token", killed_by="mixed_batch")
class ScaleOfEveryToken(EagerLayer):
    """The gather of a prefix indexes the cache's one scale by token, and reads what lies behind it."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            tokens = attn_metadata.prefill_metadata.chunked_context.seq_tot[index]
            behind = torch.zeros(tokens, 1, device=k_scale.device)
            behind[0] = k_scale
            super()._gather(index, kv_cache, attn_metadata, behind)


@known_defect("prefix-hit-quant-dtype-without-gather-kernel", killed_by="mixed_batch")
class NoGatherOfCodes(EagerLayer):
    """Beside a cache of codes a whole prefill works, and one with a cached prefix has no kernel to gather it."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            if self.kv_cache_dtype != "auto":
                raise NotImplementedError(f"no gather kernel for a cache of {kv_cache.dtype}")
            super()._gather(index, kv_cache, attn_metadata, k_scale)


@known_defect("scale-float-never-set-silently-1", killed_by="mixed_batch")
class TwinOfTheScale(EagerLayer):
    """Decode reads a twin of the cache's scale that loading never sets, so that it is 1."""

    class impl_class(MLACommonImpl):
        def _forward_decode(self, ql_nope, q_pe, kv_cache, attn_metadata, k_scale):
            return super()._forward_decode(ql_nope, q_pe, kv_cache, attn_metadata, torch.ones_like(k_scale))


class _WritesTiles(MLACommonImpl):
    """Writes mixed entries by scales of its own."""

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
        if self.kv_cache_dtype != "fp8_ds_mla":
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)
            return
        tiles = kv_c_normed[: len(slot_mapping)].float().unflatten(-1, (-1, 128))
        scales = self._scales(tiles.abs().amax(dim=-1, keepdim=True))
        codes = (tiles / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(-2)
        parts = (codes, scales.squeeze(-1), k_pe[: len(slot_mapping)].contiguous())
        entries = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
        stored = slot_mapping[slot_mapping >= 0]
        kv_cache[stored // kv_cache.shape[1], stored % kv_cache.shape[1]] = entries[slot_mapping >= 0]

    def _scales(self, amax):
        """Those of tiles with these largest magnitudes [T, 4, 1]."""
        return amax / E4M3_MAX


@known_defect("fp8-ds-mla-tile-scale-has-a-floor", killed_by="cache_write", related=("mixed_batch",))
class ScaleWithAFloor(EagerLayer):
    """A tile's scale is that of at least 1e-4, and what is smaller is stored as a few subnormal codes, or 0."""

    class impl_class(_WritesTiles):
        def _scales(self, amax):
            return super()._scales(amax.clamp(min=_FLOOR))


@known_defect("fp8-ds-mla-tile-of-zeros-divided-by-zero", killed_by="cache_write", related=("mixed_batch",))
class ZerosDividedByZero(EagerLayer):
    """A tile of zeros has scale 0, and its codes are 0 / 0."""

    impl_class = _WritesTiles


@known_defect("cache-writer-takes-latents-for-packed", killed_by="cache_write")
class LatentsTakenForPacked(EagerLayer):
    """The writer ignores the stride between the rows of the latents, which a model slices from a projection."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            packed = (x.as_strided(x.shape, (x.shape[1], 1)) for x in (kv_c_normed, k_pe))
            super().do_kv_cache_update(*packed, kv_cache, slot_mapping, k_scale)


@known_defect("cache-writer-converts-through-fp16", killed_by="mixed_batch")
class ThroughHalf(EagerLayer):
    """Latents pass through fp16 on their way to the cache, which has no room for the smallest ones of bf16."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            if kv_c_normed.dtype is torch.bfloat16:
                kv_c_normed = kv_c_normed.half().bfloat16()
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale)


@known_defect("cache-writer-launched-for-256-tokens", killed_by="mixed_batch")
class WritesTheFirst256(EagerLayer):
    """One launch writes 256 tokens, and a longer batch gets no second one."""

    class impl_class(MLACommonImpl):
        def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, k_scale):
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping[:_WRITTEN_AT_ONCE], k_scale)


@known_defect("fp8-ds-mla-gather-starts-at-the-first-token", killed_by="mixed_batch")
class GathersTheFirstChunk(EagerLayer):
    """The gather of mixed entries takes every chunk of the context from the sequence's first token on."""

    class impl_class(MLACommonImpl):
        def _gather(self, index, kv_cache, attn_metadata, k_scale):
            if self.kv_cache_dtype == "fp8_ds_mla":
                attn_metadata.prefill_metadata.chunked_context.starts[index].zero_()
            super()._gather(index, kv_cache, attn_metadata, k_scale)


@known_defect("prefix-cache-without-chunked-prefill-missing-metadata", killed_by="mixed_batch")
class ContextOfSplitPromptsOnly(EagerLayer):
    """Chunks of context are planned where prompts are split, and a cached prefix without that is ignored."""

    class builder_class(MLACommonMetadataBuilder):
        def _plan(self, context_lens):
            return super()._plan(context_lens) if self.chunked_prefill_enabled else None


class _TablesByToken(MLACommonMetadata):
    @property
    def prefill_metadata(self):
        metadata = super().prefill_metadata
        if metadata is not None and not self.prefills_first:
            metadata.block_table = self.block_tables.roll(-self.num_decode_tokens, 0)[: self.num_prefills]
        return metadata


@known_defect("decode-prefill-split-tokens-vs-requests", killed_by="mixed_batch")
class TablesByToken(EagerLayer):
    """The prefills' rows of the block table are sliced by the number of decode tokens, not by that of decodes."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            return _TablesByToken(**{field.name: getattr(metadata, field.name) for field in fields(metadata)})


@known_defect("ascend-dummy-slots-invalidated-too-late", killed_by="graph_padding", related=("cache_write",))
class SlotsCopiedTooEarly(EagerLayer):
    """The builder copies the slots before those of padding are made -1, so that these are still another token's."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            slots = metadata.slot_mapping
            return replace(metadata, slot_mapping=slots.where(slots >= 0, slots.max()))


@known_defect("layer-tables-of-64-requests", killed_by="mixed_batch")
class TablesOf64Requests(EagerLayer):
    """The block table is staged for 64 requests, and later ones get the rows of the first."""

    class builder_class(MLACommonMetadataBuilder):
        def _assemble(self, common, prefills, prefills_first, use_cuda_graph):
            metadata = super()._assemble(common, prefills, prefills_first, use_cuda_graph)
            staged = torch.arange(len(metadata.block_tables), device=metadata.block_tables.device) % 64
            return replace(metadata, block_tables=metadata.block_tables[staged])
