"""Layers that write, gather or project wrongly, remember an earlier call, misread other ranks, or replay a capture."""

from dataclasses import replace
from typing import Any

import torch

from mla_conformance.backends import eager, eager_decode
from mla_conformance.backends.layer import mla_builder, mla_impl, mla_layer
from mla_conformance.defects import bases
from mla_conformance.defects.bases import kept, mixed_entries, note, packed, pages_of, places, several, slots_of
from mla_conformance.defects.known import Defects, before, behind, but, instead, together, variant
from mla_conformance.reference.quantization import E4M3_MAX


class _Prefill(eager.EagerPrefillBackend, Defects, part="prefill_backend"):
    layer_tile_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=64)


class _MixedBatch(mla_builder.MLACommonMetadataBuilder, Defects, part="builder_class"):
    def prefix_cache_without_chunked_prefill_missing_metadata__plan(self, context_lens):
        return super()._plan(context_lens) if self.chunked_prefill_enabled else ()

    def layer_tables_of_64_requests__behind_assemble(self, metadata):
        return replace(metadata, block_tables=metadata.block_tables[places(metadata.block_tables) % 64])


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


class _CacheOfTheLayer(bases.EagerLayer, Defects):
    mla_kv_spec_quant_mode_none_size_mismatch = instead(
        "get_kv_cache_shape", staticmethod(lambda blocks, page, heads, head_size, **layout: (blocks, page, head_size))
    )
    copy_blocks_first_cache_only = instead(
        "copy_blocks", staticmethod(lambda kv_caches, pairs: bases.EagerLayer.copy_blocks(kv_caches[:1], pairs))
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
        bases.EagerLayer.copy_blocks(kv_caches, torch.tensor(list(by_source.items()), device=src_to_dists.device))


def _as_codes(weight):
    """The weights of e4m3 codes with one scale."""
    scale = weight.abs().max().float() / E4M3_MAX
    return ((weight / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


def _scaled_at_least(least):
    """A step by which tiles of mixed entries have the scale of this magnitude at least."""
    return lambda self: note(self._cache, _tile_scales=lambda largest, form: (largest.clamp(min=least) / E4M3_MAX,) * 2)


class _Impl(mla_impl.MLACommonImpl, Defects, part="impl_class"):
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
        return output.masked_fill(bases.keyless(lse), torch.nan), lse.masked_fill(lse == -torch.inf, torch.nan)

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
        first = places(self.W_UV) % 16
        self.W_UK_T, self.W_UV = self.W_UK_T[first], self.W_UV[first]


_OWNER: list[Any] = [object(), None]  # the metadata that were seen last, and the first layer that was handed them


class _OtherDecode(eager_decode.EagerDecodeBackend, Defects, part="decode_backend"):
    layer_several_tokens_assume_packed_pages = before("entries", kv_cache=packed, when=several)

    def layer_decodes_with_scale_of_one_model__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self.scale = 1.59 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


class _OtherMetadataBuilder(mla_builder.MLACommonMetadataBuilder, Defects, part="builder_class"):
    dcp_every_rank_takes_itself_for_the_first = together(
        behind("sharding", lambda sharding: sharding._replace(rank=0)),
        behind("assemble", lambda self, metadata: replace(metadata, dcp_rank=self.dcp_rank)),
    )

    ascend_dummy_slots_invalidated_too_late = behind(
        "assemble", lambda x: replace(x, slot_mapping=x.slot_mapping.where(x.slot_mapping >= 0, x.slot_mapping.max()))
    )

    def layer_plans_context_once_for_as_many_prefills__plan(self, context_lens):
        return kept(self, len(context_lens), super()._plan(context_lens))

    def dcp_local_length_as_total__behind_assemble(self, metadata):
        local = metadata.dcp_local_seq_lens
        return metadata if local is None else replace(metadata, seq_lens_tensor=local)

    def dcp_virtual_loc_used_raw__behind_build_from_requests(self, metadata, *, requests):
        if metadata.dcp_world_size == 1:
            return metadata
        slots = []
        for each in requests:
            positions = torch.arange(each.context_len, each.context_len + each.query_len)
            columns = (positions // self.block_size).clamp(max=len(each.block_ids) - 1)
            slots.append(torch.as_tensor(each.block_ids)[columns] * self.block_size + positions % self.block_size)
        new = torch.cat(slots).to(metadata.slot_mapping)
        return replace(metadata, slot_mapping=torch.cat((new, metadata.slot_mapping[len(new) :])))


class _OtherImpl(mla_impl.MLACommonImpl, Defects, part="impl_class"):
    layer_keeps_the_scale_of_its_first_call = before("forward", lambda self, layer: kept(self, "layer", layer))
    layer_mixed_entries_written_as_if_packed = before("do_kv_cache_update", kv_cache=packed, when=mixed_entries)
    dcp_ranks_merged_without_lse = before("merge_over_ranks", lse=torch.zeros_like)
    layer_single_pages_of_codes_written_unscaled = before(
        "do_kv_cache_update", k_scale=torch.ones_like, when=pages_of(1)
    )

    def layer_weights_found_by_the_metadata__before_forward(self, *, attn_metadata):
        if _OWNER[0] is not attn_metadata:
            _OWNER[:] = attn_metadata, self
        elif _OWNER[1] is not self:
            self.W_UK_T, self.W_UV = _OWNER[1].W_UK_T, _OWNER[1].W_UV

    def layer_returns_its_own_buffer__forward(self, *operands, **outputs):
        result = super().forward(*operands, **outputs)
        if outputs:
            return result
        buffer = kept(self, "buffer", result.new_empty(4 * len(result), result.shape[1]))
        return buffer[: len(result)].copy_(result)

    def layer_padded_batch_loses_last_of_several_tokens__behind_forward(self, result, *, attn_metadata):
        if 0 in attn_metadata.seq_lens and attn_metadata.max_decode_query_len > 1:
            decodes = attn_metadata.decode_requests
            several = attn_metadata.query_lens_cpu[decodes] > 1
            result[(attn_metadata.query_start_loc[1:][decodes] - 1)[several].long()] = 0.0

    @but("v_up_proj__absorbed_decode")
    def layer_tail_of_heads_projected_as_one_with_several_tokens(self, x, *, attn_metadata):
        whole, exact = self.num_heads // 16 * 16, self.W_UV
        if attn_metadata.max_decode_query_len > 1 and whole:
            self.W_UV = exact[places(exact).clamp(max=whole)]
        projected = super()._v_up_proj(x)
        self.W_UV = exact
        return projected

    @but("before_merge_over_ranks__absorbed_decode")
    def layer_ranks_behind_eight_lost_with_several_tokens(self, output, lse, *, attn_metadata):
        lost = attn_metadata.max_decode_query_len > 1 and self.dcp_rank >= 8
        return bases.without_keys(output, lse) if lost else None

    def dcp_gathered_context_not_reordered__put_in_order(self, every, index, shares):
        return every.flatten(0, 1)[: len(shares.order[index])]

    def dcp_context_unpadded_by_own_length__put_in_order(self, every, index, shares):
        row, held = shares.order[index], int(shares.cu_seq_lens[index, -1])
        return every[row // shares.rows[index], (row % shares.rows[index]).clamp(max=max(held - 1, 0))]


class _GraphReplay(mla_layer.MLACommonState, Defects, part="get_state_cls"):
    stale = ()  # buffers whose rows keep what they held before where a replay does not need them

    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, *further):
        before = {name: input_buffers[name].clone() for name in self.stale}
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, *further)
        for name, buffer in before.items():
            input_buffers[name][attn_metadata.num_decode_tokens :] = buffer[attn_metadata.num_decode_tokens :]

    dsa_dummy_run_stale_slots = variant(stale=("slot_mapping",))
    graph_padding_keeps_the_sequences_before = variant(stale=("seq_lens_tensor", "seq_lens_cpu", "block_tables"))

    def layer_replay_fills_half_of_the_block_table__behind_prepare_graph_input_buffers(self, _, *, input_buffers):
        table = input_buffers["block_tables"]
        table[:, table.shape[1] // 2 :] = -1

    @but("behind_prepare_graph_input_buffers")
    def graph_replays_the_lengths_of_the_first_batch(self, _, *, input_buffers, attn_metadata):
        for name in ("seq_lens_tensor", "seq_lens_cpu"):
            first, rows = kept(self, name, input_buffers[name].clone()), slice(attn_metadata.num_decode_tokens)
            input_buffers[name][rows] = first[rows]
