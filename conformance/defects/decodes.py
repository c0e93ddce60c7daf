"""Wrong numbers of a decode: base, scale, splits, masks over several query tokens, rows of certain sizes."""

import math
from functools import reduce

import torch

from mla_conformance.backends.eager import SoftmaxState
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects import bases
from mla_conformance.defects.bases import chosen, clear, in_base_2, joined, kept, note, several
from mla_conformance.defects.known import Defects, before, behind, but, together, variant
from mla_conformance.defects.prefills import LiftedMaximum


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
            return reduce(joined, [part for (_, shape), part in scratch.items() if shape == parts[0].total.shape])

    def trtllm_workspace_not_zero_initialised__behind_combine(self, state, *, parts):
        return state._replace(weighted=state.weighted + 1e3) if len(parts) > 1 else state

    decode_lse_of_first_split_with_many_heads = together(
        behind("combine", lambda self, _, *, parts: note(self, one=parts[0]) if self.num_heads >= 32 else None),
        behind(
            "finish", lambda self, output, _, *, state: (output, super()._finish(self.__dict__.pop("one", state))[1])
        ),
        split=512,
    )

    @but(split=64)
    def mtp_split_fully_causal_masked_zero_times_nan__part(self, state):
        return state._replace(weighted=state.weighted / state.total * state.total)

    def decode_head_groups_share_four_splits__combine(self, parts):
        whole, four = super()._combine(parts), super()._combine(parts[:4])
        second = torch.arange(len(whole.total), device=whole.total.device).view(-1, 1, 1) >= 64
        return chosen(second, four, whole)

    @but(split=64)
    def decode_split_without_keys_weighs_as_a_logit_of_0__part(self, state):
        empty = state.total == 0
        return state._replace(maximum=state.maximum.masked_fill(empty, 0.0), total=state.total.masked_fill(empty, 1.0))

    @but(split=64)
    def decode_split_without_keys_repeats_the_one_before__before_combine(self, parts):
        filled = []
        for part in parts:
            filled.append(chosen(part.total == 0, filled[-1] if filled else part, part))
        return filled


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

    lse_base2_dcp_combine_flashinfer_mla = behind("finish", lse=in_base_2)
    no_lse_when_dcp_needs_it = behind("run_decode", lambda run_decode: (run_decode[0], None))
    decode_lse_index_in_two_bytes = behind("run_decode", lambda output, lse: clear(lse.flatten()[65536:]))
    decode_lse_of_128_rows = behind("run_decode", lambda output, lse: clear(lse[:, 128:]))

    def decode_lse_rows_advance_by_a_power_of_two__behind_run_decode(self, output, lse):
        heads, tokens = lse.shape
        written = lse.new_zeros(tokens, 1 << (heads - 1).bit_length())
        written[:, :heads] = lse.mT
        return output, written.flatten()[: lse.numel()].view(tokens, heads).mT.contiguous()

    @but(when=lambda self: self._model_dtype is torch.float16)
    def decode_half_sum_of_scaled_weights_overflows__behind_accumulate(self, later):
        return later._replace(total=later.total.masked_fill(later.total * 256 > 65504, torch.inf))

    decode_request_number_in_a_byte = before("blocks", lambda request: request % 256)
    decode_grid_of_1024_heads = behind("run_decode", lambda output, lse: clear(output.flatten(0, 1)[1024:]))

    def decode_bound_by_declared_longest_query__visible(self, queries, request, seq_len, tile):
        excess = self._decode_metadata.max_query_len - int(self._decode_metadata.query_lens_cpu.max())
        excess *= queries > 1
        return super()._visible(queries, request, seq_len, slice(tile.start + excess, tile.stop + excess))

    def decode_heads_and_tokens_in_one_tile_of_256__behind_visible(self, visible, *, queries):
        first = -(-256 // self.num_heads)
        return torch.cat([visible[:first], visible[first - 1 : -1]]) if first < queries else visible

    decode_tile_of_32_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=32)
    decode_tile_of_64_without_keys_raises_maximum = variant(LiftedMaximum, key_tile=64)
    decode_tile_of_128_without_keys_raises_maximum = variant(LiftedMaximum)
    decode_last_tile_of_packed_rows_lost = behind("finish", bases.last_packed_tile_lost)

    def decode_empty_context_of_several_tokens_is_padding__before_attend(self, seq_len, *, q):
        padding = len(q) > 1 and seq_len == len(q) and self._decode_metadata.dcp_world_size == 1
        return 0 if padding else seq_len

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
