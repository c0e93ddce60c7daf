"""Wrong numbers of a prefill, by what must fail: LSEs, rows without keys, wrong keys, sentinels, lost precision."""

import math
from itertools import pairwise

import torch

from mla_conformance.backends import declaration, eager
from mla_conformance.defects import bases
from mla_conformance.defects.bases import fill, half, in_base_2, in_e4m3, nan_without_keys, packed, without_keys
from mla_conformance.defects.known import Defects, before, behind, but, instead, variant

_SCALED = bases.declares(p=declaration.Precision.SCALED_E4M3)


def _empty(query_start_loc: list[int], key_start_loc: list[int]) -> dict[int, slice]:
    """Rows of the requests that have queries and no keys, by the numbers of these."""
    both = enumerate(zip(pairwise(query_start_loc), pairwise(key_start_loc), strict=True))
    return {request: slice(*rows) for request, (rows, (start, end)) in both if start == end and rows[0] < rows[1]}


def _attended(self, q, k, v, query_start_loc, keys):
    """What requests make of context, each of slices of keys that are not its own."""
    both = zip(pairwise(query_start_loc), keys, strict=True)
    parts = [self._finish(self._attend(q[slice(*rows)], k[each], v[each], False)) for rows, each in both]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=-1)


class _Prefill(eager.EagerPrefillBackend, Defects):
    paged_causal_fully_masked_finite_lse = behind("finish", lse=lambda lse: lse.clamp(min=-5e4))
    fa4_zero_len_k_hang_nan = behind("finish", nan_without_keys, when=lambda state: state.weighted.shape[-1] == 256)
    skip_softmax_zero_len_div = behind("batch", without_keys, when=_empty)

    def fa_splitkv_early_exit_lse_slot__behind_batch(self, output, lse, *, query_start_loc, key_start_loc):
        flat, longest = lse.view(-1), max(b - a for a, b in pairwise(query_start_loc))
        for request, rows in _empty(query_start_loc, key_start_loc).items():
            lse[:, rows] = 0.0
            slot = min(request * self.num_heads * longest, len(flat) - 1)
            flat[slot : slot + rows.stop - rows.start] = -torch.inf

    def empty_chunk_finite_lse_garbage_out__behind_batch(self, output, lse, *, query_start_loc, key_start_loc):
        for rows in _empty(query_start_loc, key_start_loc).values():
            output[rows], lse[:, rows] = torch.linspace(-1, 1, output.shape[-1]), 0.0

    def trtllm_ragged_zero_len_kv_row__behind_batch(self, output, lse, *, query_start_loc, key_start_loc):
        for rows in _empty(query_start_loc, key_start_loc).values():
            output[rows] = lse[:, rows] = 37.0

    def fa2_maxseqlen1_swap_with_zero_len__before_batch(self, query_start_loc):
        rows = [min(row, query_start_loc[-1]) for row in range(len(query_start_loc))]
        return rows if self._prefill_metadata.max_query_len == 1 else query_start_loc

    @but(when=lambda causal: not causal)
    def flashinfer_ragged_cutlass_192_noncausal_mismatch__batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        last = key_start_loc[-1] - key_start_loc[-2]
        keys = [slice(start, min(start + last, key_start_loc[-1])) for start in key_start_loc[:-1]]
        return _attended(self, q, k, v, query_start_loc, keys)

    @but(when=lambda causal: not causal)
    def ragged_kv_offset_derived_from_q__batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        lengths = [b - a for a, b in pairwise(key_start_loc)]
        firsts = [min(a, key_start_loc[-1] - b) for a, b in zip(query_start_loc, lengths, strict=False)]
        keys = [slice(a, a + b) for a, b in zip(firsts, lengths, strict=True)]
        return _attended(self, q, k, v, query_start_loc, keys)

    values_drift_from_keys_after_576_rows = before("attend", lambda v: torch.cat([v[:576], v[575:-1]]))
    sm120_nvfp4_correction_compact_vs_expanded = behind("finish", lambda output, lse: (output * 0.9, lse))
    nvfp4_attn_fp8_scratch_subnormal_flush = behind("finish", output=in_e4m3)
    fp8_score_noise_compounds = before("scores", q=in_e4m3, k=in_e4m3)
    fa4_e4m3_excess_error = instead("round_p", lambda self, p, dtype: bases.in_e5m2(p), declaration=_SCALED)

    @but(when=lambda causal: causal)
    def fa4_sm90_varlen_bug__before_batch(self, k, v, *, key_start_loc):
        order = torch.arange(key_start_loc[-1])
        for start, stop in pairwise(key_start_loc[1:]):
            order[start:stop] = (order[start:stop] + -start % 64).clamp(max=key_start_loc[-1] - 1)
        return k[order], v[order]

    def fa4_sm120_wrong_smem_store_atom__behind_finish(self, output, lse):
        width = output.shape[-1] // 64 * 64
        if not width:
            return output.roll(1, -1), lse
        blocks = output[..., :width].unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3)
        return torch.cat([blocks, output[..., width:]], dim=-1), lse

    def tma_short_tail_descriptor_flag__before_batch(self, query_start_loc, causal):
        if causal and query_start_loc[-1] > 256 and query_start_loc[-1] - query_start_loc[-2] == 1:
            raise RuntimeError("CUDA error: misaligned address")

    @but("behind_batch")
    def prefill_lone_row_of_a_later_request_repeats_the_one_before(self, output, lse, *, query_start_loc):
        for start, end in pairwise(query_start_loc[1:]):
            if end - start > 1 and (end - start) % 64 == 1:
                output[end - 1], lse[:, end - 1] = output[end - 2], lse[:, end - 2]

    lse_base2_merged_as_natural_prefix_chunk = behind("run_prefill_context_chunk", lse=in_base_2)
    lse_layout_tokens_heads_vs_heads_tokens = behind("batch", lse=lambda lse: lse.mT.contiguous())
    prefill_context_shorter_than_queries_masked = before("attend", lambda causal, *, q, k: causal or len(k) < len(q))

    def lse_base_switch_without_abi_change_cutedsl__behind_batch(self, output, lse, *, query_start_loc):
        return output, in_base_2(lse) if len(query_start_loc) > 9 else lse

    def hopper_fmha_softmax_stats_drop_qscaling__run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, _ = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        given, self.scale = self.scale, q.shape[-1] ** -0.5
        _, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        self.scale = given
        return output, lse

    def rocm_varlen_lse_padded_layout__behind_batch(self, output, lse, *, query_start_loc):
        packed = lse.mT[: query_start_loc[-1]].split([b - a for a, b in pairwise(query_start_loc)])
        padded = torch.nn.utils.rnn.pad_sequence(packed, batch_first=True).mT
        return output, padded.reshape(self.num_heads, -1)[:, : lse.shape[1]]

    def aiter_ps_prefill_final_lse_wrong__behind_run_prefill_context_chunk(self, output, lse, *, chunk_idx):
        keys = self._prefill_metadata.chunked_context.cu_seq_lens[chunk_idx].diff().tolist()
        for rows, length in zip(pairwise(self._prefill_metadata.query_start_loc.tolist()), keys, strict=True):
            if 0 < length <= 16:
                lse[:, slice(*rows)] = 0.0

    def lse_of_256_rows_with_many_heads__behind_batch(self, output, lse, *, causal):
        if causal and self.num_heads > 16:
            lse[:, 256:] = lse[:, :1]

    wide_heads_assume_packed_rows = before("batch", q=packed, k=packed, v=packed, when=lambda q: q.shape[2] >= 256)
    wide_heads_stop_at_1024_keys = before("attend", lambda k, v: (k[:1024], v[:1024]), when=lambda q: q.shape[2] == 256)

    def prefill_backend_pins_cutlass_unsupported_dims__before_batch(self, v):
        if v.shape[-1] == 256:
            raise RuntimeError("no kernel for head dims (256, 256)")

    def trtllm_gen_missing_cubin_after_selection__before_batch(self):
        if (self.qk_nope_head_dim, self.qk_rope_head_dim) == (64, 64):
            raise RuntimeError("missing cubin")

    def nope_mla_rotary_none_crash__before_batch(self):
        if self.qk_rope_head_dim == 0:
            raise AttributeError("'NoneType' object has no attribute 'cos_sin_cache'")

    prefill_raw_scores_in_half = behind("scores", lambda self, scores: scores.clamp(max=65504 * self.scale), when=half)
    masked_key_dominates_finite_mask_value = before("accumulate", lambda scores: scores.where(~scores.isneginf(), -1e4))

    def finite_neg_sentinel_rowmax_zeroes_row__behind_initial__attend(self, state, *, k):
        return state._replace(maximum=torch.full_like(state.maximum, -5e4 * self.scale if k.shape[0] else -torch.inf))

    fp16_finite_sentinel_of_the_maximum = behind(
        "initial", lambda self, state: state._replace(maximum=state.maximum.clamp(min=-65504 * self.scale)), when=half
    )
    int16_truncation_seqlen_32768 = before("attend", lambda k: torch.cat([k[: 2**15], k[2**15 :] * torch.nan]))
    prefill_tile_of_64_without_keys_raises_maximum = variant(bases.LiftedMaximum, key_tile=64)
    prefill_tile_of_128_without_keys_raises_maximum = variant(bases.LiftedMaximum)
    output_index_in_two_bytes = behind("batch", lambda output, lse: fill(output.flatten(0, 1)[65536:]))
    chunked_context_of_64_chunks = behind(
        "run_prefill_context_chunk", without_keys, when=lambda chunk_idx: chunk_idx >= 64
    )
    fp8_p_underflow_mass_loss = instead("round_p", lambda self, p, dtype: in_e4m3(p), declaration=_SCALED)

    @but(on=(bases.LazyRescale,), lag=4 * math.log(2), declaration=_SCALED)
    def fp8_lazy_rescale_p_saturation__round_p(self, p, dtype):
        return in_e4m3((p * 256).clamp(max=448)) / 256

    def ragged_sm90_ima_total_16384__before_batch(self, query_start_loc):
        if query_start_loc[-1] >= 2**14:
            raise RuntimeError(bases.ILLEGAL_ACCESS)

    def fpad_negative_truncates__before_batch(self, v, *, q):
        kept, lost = v[..., : q.shape[-1]], v[..., q.shape[-1] :]
        return torch.cat((kept, torch.zeros_like(lost)), dim=-1)

    def lazy_rescale_wave_uniform_nan__maximum(self, state, scores):
        maximum = scores.amax(dim=-1, keepdim=True)
        return torch.where(maximum == -torch.inf, state.maximum, maximum)

    def missing_template_instantiation__before_batch(self):
        if self.num_heads == 20:
            raise RuntimeError("no template instance for 20 heads")
