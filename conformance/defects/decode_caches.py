"""Pages that a decode looks up wrongly, codes that it reads as other numbers, what lies with other ranks."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects import bases
from mla_conformance.defects.bases import codes, in_e4m3, mixed_entries, on_ranks, packed, pages_of, several
from mla_conformance.defects.known import Defects, before, behind, but, instead, together


class ReadsOn(EagerDecodeBackend, Defects):
    """Reads to the end of the last page, and does something wrong with what it finds there."""

    def mla_last_page_nan_leak__tail(self, state, q, keys):
        return bases.weighed_with_zero(state, self._values(keys))

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


class _Decode(EagerDecodeBackend, Defects):
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
    decode_codes_of_large_pages_unscaled = before("run_decode", k_scale=torch.ones_like, when=pages_of(128))
    decode_codes_bound_by_token_in_three_bits = behind(
        "visible", lambda visible, *, queries: visible[torch.arange(queries, device=visible.device) % 8], when=codes
    )

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

    decode_single_pages_assumed_packed = before("entries", kv_cache=packed, when=pages_of(1))
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
