"""Wrong numbers of a decode: base, scale, splits, masks, rows; pages looked up wrongly, codes misread, other ranks."""

import math
from dataclasses import replace
from functools import reduce
from itertools import accumulate

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects import bases
from mla_conformance.defects.bases import codes, in_e4m3, kept, mixed_entries, on_ranks, packed, several
from mla_conformance.defects.known import Defects, before, behind, but, instead, together, variant


class _Splits(bases.SplitDecode, Defects):
    decode_workspace_of_64_partials = before(
        "combine__attend", lambda parts, *, request: parts[: max(1, 64 - request * len(parts))], split=64
    )

    @but(split=128, when=lambda parts: len(parts) > 1)
    def cutlass_mla_splitkv_lse_overflow_large_q__combine(self, parts):
        total = sum(part.total * part.maximum.exp() for part in parts)
        weighted = sum(part.weighted * part.maximum.exp() for part in parts)
        return SoftmaxState(torch.zeros_like(total), total, weighted)

    @but(split=128, when=lambda parts: len(parts) & (len(parts) - 1))
    def splitk_reduce_pow2_padding_uninit__behind_combine(self, state):
        return state._replace(weighted=state.weighted + 0.0 * torch.nan)

    class window_stage2_merges_empty_splits:
        def _starts(self, seq_len):
            return range(0, seq_len, max(128, -(-seq_len // 4)))

        def _combine(self, parts):
            scratch = kept(self, "scratch", {})
            scratch |= {(slot, part.total.shape): part for slot, part in enumerate(parts)}
            return reduce(bases.joined, [part for (_, shape), part in scratch.items() if shape == parts[0].total.shape])

    def trtllm_workspace_not_zero_initialised__behind_combine(self, state, *, parts):
        return state._replace(weighted=state.weighted + 1e3) if len(parts) > 1 else state

    decode_lse_of_first_split_with_many_heads = together(
        behind("combine", lambda self, _, *, parts: bases.note(self, one=parts[0]) if self.num_heads >= 32 else None),
        behind(
            "finish", lambda self, output, _, *, state: (output, super()._finish(self.__dict__.pop("one", state))[1])
        ),
        split=512,
    )

    @but(split=64)
    def mtp_split_fully_causal_masked_zero_times_nan__before_combine(self, parts):
        return [part._replace(weighted=part.weighted / part.total * part.total) for part in parts]

    def decode_head_groups_share_four_splits__combine(self, parts):
        whole, four = super()._combine(parts), super()._combine(parts[:4])
        return bases.chosen(bases.places(whole.total).view(-1, 1, 1) >= 64, four, whole)

    @but(split=64)
    def decode_split_without_keys_weighs_as_a_logit_of_0__before_combine(self, parts):
        one = torch.ones_like(parts[0].total)
        return [bases.chosen(part.total == 0, part._replace(maximum=0 * one, total=one), part) for part in parts]

    @but(split=64)
    def decode_split_without_keys_repeats_the_one_before__before_combine(self, parts):
        return list(accumulate(parts, lambda before, part: bases.chosen(part.total == 0, before, part)))


class _Decode(EagerDecodeBackend, Defects):
    def causal_topleft_instead_of_bottomright__visible(self, queries, request, seq_len, tile):
        from_the_top = torch.arange(tile.start, tile.stop) <= torch.arange(queries).unsqueeze(1)
        return from_the_top if queries > 1 else super()._visible(queries, request, seq_len, tile)

    def causal_arg_accepted_but_dropped__visible(self, queries, request, seq_len, tile):
        return super()._visible(1, request, seq_len, tile).expand(queries, -1)

    def single_batch_mask_mid_decode_shape__visible(self, queries, request, seq_len, tile):
        position = torch.arange(tile.start, tile.stop)
        return (position >= queries) | (position <= torch.arange(queries).unsqueeze(1))

    def aiter_mtp_metadata_sized_for_qlen1__behind_finish(self, output, lse):
        output[1:], lse[:, 1:] = 0.0, -torch.inf

    def aiter_identical_output_all_query_positions__behind_finish(self, output, lse):
        exact = len(output) & (len(output) - 1) == 0
        return (output, lse) if exact else (output[:1].expand_as(output), lse[:, :1].expand_as(lse))

    mla_decode_scale_missing_log2e = behind("scores", lambda scores: scores * math.log(2))

    def sm89_mla_correctness__tiles(self, keys):
        for tile in super()._tiles(keys):
            yield slice(tile.start, tile.start + -(-(tile.stop - tile.start) // 2))

    def xqa_mla_bf16_ten_bugs__behind_dequantise(self, keys, *, rows):
        every_other = keys.flatten()[torch.arange(keys.numel()) * 2 % keys.numel()].view(keys.shape)
        return every_other if rows.dtype.itemsize == 2 else keys

    @but(when=lambda ql_nope: ql_nope.dtype is torch.float16)
    def cudnn_decode_key_omits_dtype_hardcoded_bf16__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        cache = kv_cache.view(torch.bfloat16) if kv_cache.dtype is torch.float16 else kv_cache
        output, lse = super().run_decode(ql_nope.view(torch.bfloat16), q_pe.view(torch.bfloat16), cache, k_scale)
        return output.view(torch.float16), lse

    def mla_multi_seq_decode_cross_contamination__before_attend(self, q, *, request):
        found = self.__dict__.get("scratch", q) if request else q
        self.scratch = q
        return found if found.shape == q.shape else q

    @but(when=lambda self, seq_len: len(self._decode_metadata.seq_lens) > 8 and seq_len > 1024)
    def decode_longest_of_many_loses_a_tile__before_over(self, tiles):
        return list(tiles)[:-1]

    def decode_table_rows_as_wide_as_the_first__blocks__entries(self, request, pages, *, kv_cache):
        metadata, held = self._decode_metadata, -(-self._decode_metadata.seq_lens // kv_cache.shape[1])
        stride = metadata.block_table.shape[1] - int(held.max() - held[0])
        return metadata.block_table.flatten()[request * stride + pages].long()

    def mistral4_triton_mla_latent_dims_hardcoded__before_attend(self):
        if self.kv_lora_rank != 512:
            raise RuntimeError(f"arange's range must be a power of two: 512 + 64 columns for L = {self.kv_lora_rank}")

    lse_base2_dcp_combine_flashinfer_mla = behind("finish", lse=bases.in_base_2)
    no_lse_when_dcp_needs_it = behind("run_decode", lambda run_decode: (run_decode[0], None))
    decode_lse_index_in_two_bytes = behind("run_decode", lambda output, lse: bases.fill(lse.flatten()[65536:]))
    decode_lse_of_128_rows = behind("run_decode", lambda output, lse: bases.fill(lse[:, 128:]))

    def decode_lse_rows_advance_by_a_power_of_two__behind_run_decode(self, output, lse):
        heads, tokens = lse.shape
        written = lse.new_zeros(tokens, 1 << (heads - 1).bit_length())
        written[:, :heads] = lse.mT
        return output, written.flatten()[: lse.numel()].view(tokens, heads).mT.contiguous()

    @but(when=lambda self: self._model_dtype is torch.float16)
    def decode_half_sum_of_scaled_weights_overflows__behind_accumulate(self, later):
        return later._replace(total=later.total.masked_fill(later.total * 256 > 65504, torch.inf))

    decode_request_number_in_a_byte = before("blocks", lambda request: request % 256)
    decode_grid_of_1024_heads = behind("run_decode", lambda output, lse: bases.fill(output.flatten(0, 1)[1024:]))

    def decode_bound_by_declared_longest_query__visible(self, queries, request, seq_len, tile):
        excess = self._decode_metadata.max_query_len - int(self._decode_metadata.query_lens_cpu.max())
        excess *= queries > 1
        return super()._visible(queries, request, seq_len, slice(tile.start + excess, tile.stop + excess))

    def decode_heads_and_tokens_in_one_tile_of_256__behind_visible(self, visible, *, queries):
        first = -(-256 // self.num_heads)
        return torch.cat([visible[:first], visible[first - 1 : -1]]) if first < queries else visible

    decode_tile_of_32_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=32)
    decode_tile_of_64_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=64)
    decode_tile_of_128_without_keys_raises_maximum = variant(bases.LiftedMaximum)
    decode_last_tile_of_packed_rows_lost = behind("finish", bases.last_packed_tile_lost)

    def decode_empty_context_of_several_tokens_is_padding__before_attend(self, seq_len, *, q):
        return 0 if len(q) > 1 and seq_len == len(q) and self._decode_metadata.dcp_world_size == 1 else seq_len

    def decode_padded_batch_has_as_many_tokens_each__behind_attend(self, state):
        metadata = self._decode_metadata
        if metadata.dcp_world_size == 1 and not bool(metadata.seq_lens.all()):
            state.weighted[:, int(metadata.query_lens_cpu[0]) :] = 0.0

    def triton_mla_spec_decode_block_table_oob__before_blocks(self, request):
        metadata = self._decode_metadata
        return min(int(metadata.query_start_loc[request]), metadata.block_table.shape[0] - 1)

    @but(when=several)
    def flashmla_draft_extend_metadata_layout_clash__blocks__entries(self, request, pages, *, kv_cache):
        metadata, before = self._decode_metadata, -(-self._decode_metadata.seq_lens[:request] // kv_cache.shape[1])
        return metadata.block_table.flatten()[int(before.sum()) + pages].long()

    def decode_pages_of_32_with_several_tokens__before_blocks__entries(self, pages, *, kv_cache):
        return pages // 2 * 2 if several(self) and kv_cache.shape[1] == 32 else pages


class ReadsOn(EagerDecodeBackend, Defects):
    """Reads to the end of the last page, and does something wrong with what it finds there."""

    mla_last_page_nan_leak = instead("tail", lambda self, state, q, x: bases.weighed_with_zero(state, self._values(x)))

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        unused = slice(seq_len, -(-seq_len // kv_cache.shape[1]) * kv_cache.shape[1])
        if unused.start == unused.stop:
            return state
        return self._tail(state, q, self._dequantise(self._entries(kv_cache, request, unused), k_scale).unsqueeze(1))

    def tma_overread_uninitialised_kv_tile__tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys) - torch.inf, torch.zeros_like(self._values(keys)))

    def paged_flex_missing_upper_bound_mask__tail(self, state, q, keys):
        return self._accumulate(state, self._scores(q, keys), self._values(keys))


def _locally_causal(self, queries, request, seq_len, tile):
    return torch.arange(tile.start, tile.stop) <= torch.arange(seq_len - queries, seq_len).unsqueeze(1)


class _OfCaches(EagerDecodeBackend, Defects):
    mla_kernels_assume_packed_pages = before("entries", kv_cache=packed)
    decode_page_number_in_two_bytes = behind("blocks", lambda blocks: blocks & 0xFFFF)
    dense_mla_invalid_page_ids_cross_request = together(
        before("attend", lambda self, seq_len: seq_len or int(not on_ranks(self))),
        behind("blocks__entries", lambda blocks, *, kv_cache: blocks.clamp(0, len(kv_cache) - 1)),
    )

    def flashmla_kv_indices_loop_tokens_vs_pages__blocks(self, request, pages):
        copied = -(-int(self._decode_metadata.seq_lens[request]) // 4096) * 64
        return super()._blocks(request, pages).masked_fill(pages >= copied, 0)

    @but(when=lambda seq_len: seq_len % 64)
    def aiter_oob_page_id_folds_to_slot0_nan__behind_attend(self, state, *, kv_cache, k_scale):
        slot = self._values(self._dequantise(kv_cache[:1, 0].contiguous(), k_scale).unsqueeze(1))
        return bases.weighed_with_zero(state, slot)

    def decode_slot_in_fifteen_bits__entries(self, kv_cache, request, tile):
        page, tokens = kv_cache.shape[1], torch.arange(tile.start, tile.stop, device=kv_cache.device)
        slots = self._blocks(request, tokens // page) * page + tokens % page & 0x7FFF
        return kv_cache.view(torch.uint8)[slots // page, slots % page].view(kv_cache.dtype)

    def decode_full_last_page_fetches_the_next__before_attend(self, *, request, seq_len, kv_cache):
        column, offset = divmod(seq_len, kv_cache.shape[1])
        row = self._decode_metadata.block_table[request]
        if seq_len and not offset and column < len(row) and not 0 <= int(row[column]) < len(kv_cache):
            raise RuntimeError(bases.ILLEGAL_ACCESS)

    def aiter_qh64_pagesize1_fault__before_entries(self, kv_cache):
        if kv_cache.shape[1] == 1 and len(self._decode_metadata.seq_lens) >= 16:
            raise RuntimeError("memory access fault: page not present")

    rocm_fp8_gluon_batch1_only = before("blocks", request=0, when=codes)
    cutlass_mla_claims_fp8_without_scales = before("dequantise", k_scale=torch.ones_like)
    decode_codes_unscaled_with_several_tokens = before("run_decode", k_scale=torch.ones_like, when=several)
    trtllm_mha_fp8_q_without_qscale = before("scores", q=lambda q: in_e4m3(q.float().clamp(-448, 448)), when=codes)
    decode_codes_of_large_pages_unscaled = before("run_decode", k_scale=torch.ones_like, when=bases.pages_of(128))
    decode_codes_bound_by_token_in_three_bits = behind("visible", lambda x: x[bases.places(x) % 8], when=codes)

    def fp8_mla_k_scale_vs_v_scale_inconsistent__values__dequantise(self, keys, *, k_scale):
        return super()._values(keys) / (k_scale if self.kv_cache_dtype == "fp8" else 1.0)

    def decode_rope_of_codes_in_single_pages_unscaled__behind_dequantise__entries(self, keys, *, k_scale, kv_cache):
        if kv_cache.shape[1] == 1 and self.kv_cache_dtype == "fp8":
            keys[:, self.kv_lora_rank :] /= k_scale

    def aiter_no_kernel_bf16q_fp8kv_qlen5__before_attend(self, q):
        if self.kv_cache_dtype == "fp8" and q.shape[0] > 4:
            raise RuntimeError(f"no kernel for 16-bit queries, codes and {q.shape[0]} query tokens")

    def decode_codes_scaled_in_first_1024_keys__before_dequantise__entries(self, k_scale, *, tile):
        return torch.ones_like(k_scale) if tile.start >= 1024 and self.num_heads >= 64 else k_scale

    dcp_rank_in_three_bits = before("positions", lambda metadata: replace(metadata, dcp_rank=metadata.dcp_rank % 8))
    dcp_empty_owner_zero_times_nan = behind("finish", bases.nan_without_keys, when=on_ranks)
    dcp_causal_mask_on_local_len = instead("visible", _locally_causal)
    dcp_rank_in_two_bits = before("positions", lambda metadata: replace(metadata, dcp_rank=metadata.dcp_rank % 4))
    dcp_mixed_entries_bound_by_local_length = instead("visible", _locally_causal, when=mixed_entries)
    dcp_several_tokens_assume_interleave_of_one = before(
        "positions", lambda metadata: replace(metadata, cp_kv_cache_interleave_size=1), when=several
    )

    def leading_masked_chunk_nan_poisons_row__behind_accumulate(self, later):
        return bases.chosen(later.maximum == -torch.inf, SoftmaxState(*(part * torch.nan for part in later)), later)

    decode_single_pages_assumed_packed = before("entries", kv_cache=packed, when=bases.pages_of(1))
    dcp_assumes_packed_pages = before("entries", kv_cache=packed, when=on_ranks)
    fp8_ds_mla_float_scale_read_as_e8m0 = before("dequantise", rows=bases.through_e8m0, when=mixed_entries)

    def decode_last_head_tile_bound_by_first_token__behind_visible(self, visible):
        whole = self.num_heads // 16 * 16
        tail = torch.arange(self.num_heads, device=visible.device).view(-1, 1, 1) >= max(16, whole)
        return torch.where(tail, visible[:1], visible)

    @but(when=mixed_entries)
    def decode_mixed_entry_offset_in_two_bytes__entries(self, kv_cache, request, tile):
        (_, page, width), tokens = kv_cache.shape, torch.arange(tile.start, tile.stop, device=kv_cache.device)
        return kv_cache[self._blocks(request, tokens // page), (tokens % page * width & 0xFFFF) // width]

    decode_single_head_takes_first_scale_of_mixed_entries = before(
        "dequantise", rows=bases.with_the_first_scale, when=lambda self: self.num_heads == 1 and mixed_entries(self)
    )
