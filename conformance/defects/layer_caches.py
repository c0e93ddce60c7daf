"""Layers that write to their paged cache, or gather from it, what they should not; wrong weights."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.defects.bases import EagerLayer, keyless, mixed_entries, note, packed, slots_of
from mla_conformance.defects.known import Defects, before, but, instead, variant
from mla_conformance.defects.prefills import LiftedMaximum
from mla_conformance.reference.quantization import E4M3_MAX


class _Prefill(EagerPrefillBackend, Defects, part="prefill_backend"):
    layer_tile_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=64)


class _MixedBatch(MLACommonMetadataBuilder, Defects, part="builder_class"):
    def prefix_cache_without_chunked_prefill_missing_metadata__plan(self, context_lens):
        return super()._plan(context_lens) if self.chunked_prefill_enabled else ()

    def layer_tables_of_64_requests__behind_assemble(self, metadata):
        staged = torch.arange(len(metadata.block_tables), device=metadata.block_tables.device) % 64
        return replace(metadata, block_tables=metadata.block_tables[staged])


def _with_stride_of(cache, other):
    """As many blocks as fit, with the stride between blocks that another cache has."""
    stride = other.stride(0)
    room = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    blocks = min(len(cache), (room - cache[0].numel()) // stride + 1)
    return cache.as_strided((blocks, *cache.shape[1:]), (stride, *cache.stride()[1:]))


def _move(source, target, pairs):
    """Copy the pairs whose blocks are within both."""
    for origin, place in pairs.tolist():
        if origin < len(source) and place < len(target):
            target.view(torch.uint8)[place] = source.view(torch.uint8)[origin]


class _CacheOfTheLayer(EagerLayer, Defects):
    mla_kv_spec_quant_mode_none_size_mismatch = instead(
        "get_kv_cache_shape", staticmethod(lambda blocks, page, heads, head_size, **layout: (blocks, page, head_size))
    )
    copy_blocks_first_cache_only = instead(
        "copy_blocks", staticmethod(lambda kv_caches, pairs: EagerLayer.copy_blocks(kv_caches[:1], pairs))
    )
    swap_blocks_stride_of_the_source = instead(
        "swap_blocks", staticmethod(lambda source, target, pairs: _move(source, _with_stride_of(target, source), pairs))
    )

    @staticmethod
    def copy_blocks_stride_of_the_first_cache__copy_blocks(kv_caches, src_to_dists):
        for cache in kv_caches:
            strided = _with_stride_of(cache, kv_caches[0])
            _move(strided, strided, src_to_dists)

    @staticmethod
    def copy_blocks_one_destination_for_a_source__copy_blocks(kv_caches, src_to_dists):
        by_source = dict(src_to_dists.tolist())
        EagerLayer.copy_blocks(kv_caches, torch.tensor(list(by_source.items()), device=src_to_dists.device))


def _as_codes(weight):
    """The weights of e4m3 codes with one scale."""
    scale = weight.abs().max().float() / E4M3_MAX
    return ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def _scaled_at_least(least):
    """A step by which tiles of mixed entries have the scale of this magnitude at least."""
    return lambda self: note(self._cache, _tile_scales=lambda largest, form: (largest.clamp(min=least) / E4M3_MAX,) * 2)


class _Impl(MLACommonImpl, Defects, part="impl_class"):
    fp8_ds_mla_tile_scale_has_a_floor = before("do_kv_cache_update", _scaled_at_least(1e-4), when=mixed_entries)
    fp8_ds_mla_tile_of_zeros_divided_by_zero = before("do_kv_cache_update", _scaled_at_least(0), when=mixed_entries)
    writer_overwrites_reserved_slot0 = before("do_kv_cache_update", lambda slot_mapping: slot_mapping.clamp(min=0))
    slot_minus1_divided_writes_below_base = before(
        "do_kv_cache_update", lambda slot_mapping, *, kv_cache: slot_mapping % slots_of(kv_cache)
    )

    @but("before_do_kv_cache_update")
    def mixed_chunk_slot_count_shorter_than_rows(self, slot_mapping, *, kv_c_normed, kv_cache):
        behind = slot_mapping.new_full((len(kv_c_normed) - len(slot_mapping),), kv_cache.shape[1])
        return torch.cat((slot_mapping, behind))

    cache_writer_takes_latents_for_packed = before("do_kv_cache_update", kv_c_normed=packed, k_pe=packed)

    def layer_slot_in_fifteen_bits__before_do_kv_cache_update(self, slot_mapping):
        return torch.where(slot_mapping < 0, slot_mapping, slot_mapping & 0x7FFF)

    @but(when=mixed_entries)
    def layer_tile_of_zeros_in_mixed_entries_nan__before_do_kv_cache_update(self, kv_c_normed):
        tiles = kv_c_normed.unflatten(-1, (-1, 128))
        return tiles.masked_fill((tiles == 0).all(dim=-1, keepdim=True), torch.nan).flatten(-2)

    def gguf_weights_never_absorbed__process_weights_after_loading(self, act_dtype):
        if hasattr(self.kv_b_proj, "weight"):
            super().process_weights_after_loading(act_dtype)

    def prefix_kv_stale_after_weight_update__process_weights_after_loading(self, act_dtype):
        if hasattr(self, "W_UV"):
            return
        super().process_weights_after_loading(act_dtype)
        self.W_UK_T, self.W_UV = self.W_UK_T.clone(), self.W_UV.clone()

    dcp_fp8_context_gather_dtype_crash = before("gather", k_scale=torch.ones_like)
    scale_float_never_set_silently_1 = before("forward_decode", k_scale=torch.ones_like)
    cache_writer_launched_for_256_tokens = before("do_kv_cache_update", lambda slot_mapping: slot_mapping[:256])
    layer_codes_of_later_chunks_unscaled = before("gather", k_scale=torch.ones_like, when=lambda index: index)
    layer_ignores_the_output_buffer = instead("forward", lambda self, *operands, **outputs: super().forward(*operands))

    def decode_prefill_split_tokens_vs_requests__before_forward(self, *, attn_metadata):
        if attn_metadata.num_prefills and not attn_metadata.prefills_first:
            rows = attn_metadata.block_tables.roll(-attn_metadata.num_decode_tokens, 0)
            attn_metadata.prefill_metadata.block_table = rows[: attn_metadata.num_prefills]

    def scalar_kv_scale_indexed_per_token__before_gather(self, k_scale, *, index, attn_metadata):
        tokens = attn_metadata.prefill_metadata.chunked_context.seq_tot[index]
        return torch.nn.functional.pad(k_scale.view(1, 1), (0, 0, 0, tokens - 1))

    def prefix_hit_quant_dtype_without_gather_kernel__before_gather(self, kv_cache):
        if self.kv_cache_dtype != "auto":
            raise NotImplementedError(f"no gather kernel for a cache of {kv_cache.dtype}")

    def cache_writer_converts_through_fp16__before_do_kv_cache_update(self, kv_c_normed):
        return kv_c_normed.half().bfloat16() if kv_c_normed.dtype is torch.bfloat16 else kv_c_normed

    def fp8_ds_mla_gather_starts_at_the_first_token__before_gather(self, index, attn_metadata):
        if self.kv_cache_dtype == "fp8_ds_mla":
            attn_metadata.prefill_metadata.chunked_context.starts[index].zero_()

    def layer_given_output_lacks_decodes_beside_prefills__behind_forward(self, result, *, attn_metadata, output):
        if output is not None and attn_metadata.num_prefills:
            output[attn_metadata.decode_tokens] = 0.0

    def layer_chunks_without_keys_merged_into_nan__behind_merge(self, output, lse):
        return output.masked_fill(keyless(lse), torch.nan), lse.masked_fill(lse == -torch.inf, torch.nan)

    def layer_context_of_prefills_behind_decodes_from_first_rows__gather(self, index, kv_cache, attn_metadata, k_scale):
        metadata = attn_metadata.prefill_metadata
        own, metadata.block_table = metadata.block_table, attn_metadata.block_tables[: attn_metadata.num_prefills]
        super()._gather(index, kv_cache, attn_metadata, k_scale)
        metadata.block_table = own

    def layer_adds_to_the_output_buffer__forward(self, *operands, output=None):
        result = super().forward(*operands)
        return result if output is None else output.add_(result)

    def layer_absorbs_weights_in_e4m3__behind_process_weights_after_loading(self, _):
        self.W_UK_T, self.W_UV = _as_codes(self.W_UK_T), _as_codes(self.W_UV)

    def layer_multiplies_context_out_in_e4m3__up_project(self, kv_c, k_pe):
        exact = torch.cat((self.W_UK_T.transpose(1, 2), self.W_UV), dim=-1)
        kv = torch.einsum("sl,nlc->snc", kv_c, _as_codes(exact))
        k_nope, v = kv.tensor_split([self.qk_nope_head_dim], dim=-1)
        return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), v

    def layer_accumulates_projections_in_the_model_dtype__v_up_proj(self, x):
        total = x.new_zeros(x.shape[1], x.shape[0], self.v_head_dim)
        for latent in range(self.kv_lora_rank):
            total += x[..., latent].mT.unsqueeze(-1) * self.W_UV[:, latent].unsqueeze(1)
        return total.transpose(0, 1).flatten(1)

    def layer_absorbs_weights_of_sixteen_heads__behind_process_weights_after_loading(self, _):
        first = torch.arange(self.num_heads) % 16
        self.W_UK_T, self.W_UV = self.W_UK_T[first], self.W_UV[first]
