"""Features of a prefill that fail, what one call leaves for the next, and what a request does to its neighbours."""

from itertools import pairwise

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects import bases
from mla_conformance.defects.bases import all_or_nothing, fill, kept, note, nth, packed, places
from mla_conformance.defects.known import Defects, before, behind, but, together, variant
from mla_conformance.reference.quantization import E4M3_MAX


class _Merge(EagerPrefillBackend, Defects):
    def merge_attn_states(self, output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None):
        parts = ((prefix_output, prefix_lse), (suffix_output, suffix_lse))
        result, lse = self._merge(parts, torch.logaddexp(prefix_lse, suffix_lse), output_lse)
        output.copy_(result)
        if output_lse is not None:
            output_lse.copy_(lse)

    def _merge(self, parts, merged, output_lse):
        shift = merged.masked_fill(merged == -torch.inf, 0.0)
        return sum((lse - shift).exp().mT.unsqueeze(-1) * part.float() for part, lse in parts), merged

    merge_weighs_a_keyless_output_with_zero = variant()
    merge_clears_its_output_first = before("merge__merge_attn_states", lambda *, output: fill(output))

    @but(when=lambda output_lse: output_lse is not None)
    def merge_writes_lse_before_it_is_read__before_merge(self, *, merged, output_lse):
        output_lse.copy_(merged)

    def merge_both_neg_inf_nan__merge(self, parts, merged, output_lse):
        largest = torch.maximum(*(lse for _, lse in parts))
        weights = [(lse - largest).exp() for _, lse in parts]
        total = sum(weights)
        shares = [(weight / total).mT.unsqueeze(-1) for weight in weights]
        return sum(share * part.float() for share, (part, _) in zip(shares, parts, strict=True)), largest + total.log()


class _RunsOn(EagerPrefillBackend, Defects):
    """The last tile of a request's keys is filled up with those of the requests behind it, which are then masked."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        self._keys, self._values = (self._widened(x[: key_start_loc[-1]]) for x in (k, v))
        self._end = 0
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

    def _attend(self, q, k, v, causal):
        self._q, self._end = q, self._end + k.shape[0]
        return super()._attend(q, k, v, causal)

    def _accumulate(self, state, scores, v):
        missing = min(self.key_tile - v.shape[0], len(self._keys) - self._end)
        behind = slice(self._end, self._end + missing)
        return super()._accumulate(state, self._filled(scores, behind), torch.cat([v, self._values[behind]]))

    declaration = Declaration(distributions=("torch",), emulated=True)

    def prefill_tile_weighs_neighbours_values_with_zero__filled(self, scores, behind):
        return torch.nn.functional.pad(scores, (0, behind.stop - behind.start), value=-torch.inf)

    def prefill_additive_mask_keeps_neighbours_nan__filled(self, scores, behind):
        return torch.cat([scores, self._scores(self._q, self._keys[behind]) - torch.inf], dim=-1)


def _cleared_by_multiplication(self, state):
    before = self._before
    cleared = 0.0 if before is None or not before.weighted.numel() else 0.0 * before.weighted.amax()
    return state._replace(weighted=state.weighted + cleared)


class _Prefill(EagerPrefillBackend, Defects):
    def q8kv8_prefill_stream_ordering__before_run_prefill_new_tokens(self, k):
        return torch.cat([torch.zeros_like(k[:5]), k[5:]]) if nth(self, 11) else k

    def cp_async_wait_without_block_barrier_quant_kv__before_run_prefill_new_tokens(self, k):
        return torch.cat([k[:128], k[:-128]])[: len(k)] if nth(self, 8) else k

    hopper_fp8_accumulator_keeps_13_bits = variant(bases.HopperE4M3Operands, declaration=bases.E4M3Operands.declaration)
    prefill_float32_assumes_packed_keys = before("batch", k=packed, when=lambda k: k.dtype is torch.float32)

    @but("behind_batch")
    def prefill_request_behind_an_empty_one_lost_after_32(self, output, lse, *, query_start_loc):
        for first, start, end in zip(query_start_loc[32:], query_start_loc[33:], query_start_loc[34:], strict=False):
            if first == start:
                output[start:end] = 0.0

    def quant_output_odd_head_unscaled__before_quantise(self, output_scale, *, accumulated):
        scale = output_scale.expand(accumulated.shape[1], 1).clone()
        if len(scale) > 1 and len(scale) % 2:
            scale[-1] = 1.0
        return scale

    @but("before_quantise")
    def quant_output_unsaturated_behind_a_power_of_two_of_heads(self, accumulated, *, output_scale):
        behind = places(accumulated, 1)[:, None] >= 1 << (accumulated.shape[1].bit_length() - 1)
        return accumulated.masked_fill(behind & ((accumulated / output_scale).abs() > E4M3_MAX), torch.nan)

    @but("merge_attn_states")
    def merge_of_nothing_halves_the_odd_head(self, output, prefix_output, prefix_lse, *further, **named):
        empty = (prefix_lse[-1] == -torch.inf).unsqueeze(-1)
        super().merge_attn_states(output, prefix_output, prefix_lse, *further, **named)
        if len(prefix_lse) > 1 and len(prefix_lse) % 2:
            output[:, -1] = torch.where(empty, output[:, -1] / 2, output[:, -1])

    def fp8_operands_tail_of_heads_is_one_head__widened(self, x):
        wide, whole = super()._widened(x), x.shape[1] // 16 * 16
        return wide if wide is x or not whole else wide[:, places(x, 1).clamp(max=whole)]

    def prefill_empty_context_advances_odd_strides__before_batch(self, v, *, key_start_loc):
        empty = [start for start, end in pairwise(key_start_loc) if start == end]
        return torch.cat([v[: empty[0]], v[empty[0] :].roll(1, 0)]) if empty and v.stride(1) % 2 else v

    bmm_fp8_quant_inverted_scale = before("quantise", lambda output_scale: 1 / output_scale)

    def nan_spreads_across_rows_in_output_quant__behind_run_prefill_new_tokens(self, result, *, q, out, output_scale):
        if output_scale is not None and q.isnan().any():
            out.copy_(torch.full(out.shape, torch.nan))

    def fp4_swizzled_scale_buffer_underallocated__behind_run_prefill_new_tokens(self, result, *, out, output_scale):
        if output_scale is not None and out.shape[0] % 128:
            end = out.storage_offset() + out.numel()
            room = out.untyped_storage().nbytes() // out.element_size() - end
            beyond = min(room, (-out.shape[0] % 128) * out.shape[1] * out.shape[2])
            out.as_strided((beyond,), (1,), end).view(torch.uint8).zero_()

    @but("behind_run_prefill_new_tokens")
    def quant_output_lse_of_scaled_values(self, result, *, return_softmax_lse, output_scale):
        quantised = return_softmax_lse and output_scale is not None
        return (result[0], result[1] + output_scale.log()) if quantised else result

    @but("before_quantise__run_prefill_new_tokens")
    def quant_output_unsaturated_with_lse(self, accumulated, *, output_scale, return_softmax_lse):
        lost = ((accumulated / output_scale).abs() > E4M3_MAX) & return_softmax_lse
        return accumulated.masked_fill(lost, torch.nan)

    def quant_output_unscaled_after_512_rows__before_quantise(self, output_scale, *, accumulated):
        return torch.where(places(accumulated).view(-1, 1, 1) < 512, output_scale, 1.0)

    prefill_accumulator_cleared_by_multiplication = together(
        before("batch", lambda self: note(self, _before=None)),
        behind("attend", lambda self, state: note(self, _before=state)),
        behind("initial", _cleared_by_multiplication),
    )
    prefill_softmax_scale_in_shared_constant = variant(bases.SharedScale)

    def cudnn_graph_cache_key_omits_strides__before_run_prefill_new_tokens(self, v, *, q):
        strides = kept(self, (q.shape, v.shape), v.stride())
        places = torch.meshgrid(*map(torch.arange, v.shape), indexing="ij")
        offset = v.storage_offset() + sum(place * stride for place, stride in zip(places, strides, strict=True))
        storage = v.as_strided((v.untyped_storage().nbytes() // v.element_size(),), (1,), 0)
        return storage[offset % len(storage)]

    def tma_descriptor_cache_stale__before_run_prefill_new_tokens(self, k):
        # K is kept as well: its address is no other tensor's, and what dies of it is not the allocator's choice.
        return kept(self, (k.data_ptr(), k.shape), (k, k.clone()))[1]

    def prefill_pdl_chain_nan__before_run_prefill_new_tokens(self, k):
        previous, self.previous = getattr(self, "previous", k), k.clone()
        return torch.cat([previous[:16], k[16:]]) if previous.shape == k.shape else k

    def decode_mutates_prefill_selection_state__before_batch(self, v, *, causal):
        self.switched = getattr(self, "switched", False) or not causal
        return v.roll(1, 0) if causal and self.switched else v

    def prefill_metadata_stashed_on_shared_backend__prepare_metadata(self, prefill_metadata):
        type(self)._prefill_metadata = prefill_metadata

    def prefill_workspace_of_the_first_batch__behind_batch(self, output, lse, *, query_start_loc):
        output[query_start_loc[: kept(self, "room", len(query_start_loc) + 1)][-1] :] = 0.0

    def prefill_single_request_path_stays__behind_batch(self, output, lse, *, query_start_loc):
        self.single = getattr(self, "single", False) or len(query_start_loc) == 2
        if self.single:
            output[query_start_loc[1] :] = 0.0

    def prefill_plans_of_a_dozen_batches__behind_batch(self, output, lse, *, query_start_loc, causal):
        plans = kept(self, "plans", [])
        if causal and query_start_loc not in plans:
            plans.append(query_start_loc)
        if causal and query_start_loc not in plans[:12]:
            output[query_start_loc[-2] :] = 0.0

    def prefill_work_counter_cleared_by_the_plan__behind_run_prefill_new_tokens(self, result, *, return_softmax_lse):
        if self.__dict__.get("done") is self._prefill_metadata:
            output = result[0] if return_softmax_lse else result
            output[int(self._prefill_metadata.query_start_loc[-2]) :] = 0.0
        self.done = self._prefill_metadata

    @but(on=(bases.Capturable,))
    def prefill_replay_keeps_the_ranks_of_lengths__behind_batch(self, output, lse, *, q, query_start_loc):
        lengths = [end - start for start, end in pairwise(query_start_loc)]
        _, first = kept(self, q.data_ptr(), (q, lengths))
        for request, start in enumerate(query_start_loc[:-1]):
            longer = [lengths[row] for row in range(len(first)) if first[row] > first[request] and lengths[row]]
            output[start + min([lengths[request], *longer]) : start + lengths[request]] = 0.0

    prefill_nan_guard_over_the_batch = behind("batch", all_or_nothing)
    refusal_after_the_output_was_cleared = before("run_prefill_new_tokens", out=fill, when=lambda out: out is not None)

    def silent_noop_feature_on_fallback_backend__before_run_prefill_new_tokens(self, out, output_scale):
        return None if output_scale is None else out, output_scale

    def tma_odd_stride_illegal__before_batch(self, q, k, v):
        if any(x.stride(1) * x.element_size() % 16 for x in (q, k, v)):
            raise RuntimeError("failed to initialise the TMA descriptor")

    @but("behind_merge_attn_states")
    def merge_last_tile_of_rows_and_heads_keeps_the_suffix(self, _, *, output, suffix_output, suffix_lse):
        first = max(64, suffix_lse.numel() // 64 * 64)
        output.view(-1, output.shape[-1])[first:] = suffix_output.flatten(0, 1)[first:].to(output.dtype)

    def merge_grid_of_8192_heads__behind_merge_attn_states(self, _, *, output, suffix_output):
        output.view(-1, output.shape[-1])[8192:] = suffix_output.flatten(0, 1)[8192:].to(output.dtype)

    def e4m3fn_codes_read_as_e4m3fnuz__before_widened(self, x):
        return x.view(torch.float8_e4m3fnuz) if x.dtype == torch.float8_e4m3fn else x

    @but("behind_run_prefill_context_chunk", when=lambda chunk_idx: chunk_idx >= 16)
    def context_chunk_behind_16_is_of_the_first_request(self, output, lse):
        behind = int(self._prefill_metadata.query_start_loc[1])
        output[behind:], lse[:, behind:] = 0.0, -torch.inf

    fp8_operands_of_16_heads = behind("widened", lambda wide, *, x: wide if wide is x else wide[:, places(x, 1) % 16])

    class prefill_query_scale_over_the_batch:
        def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
            magnitudes = q[: query_start_loc[-1]].float().abs().flatten()
            self._range = torch.nn.functional.pad(magnitudes, (1, 0), value=1.0).amax().log2().floor().exp2()
            return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)

        def _scores(self, q, k):
            return super()._scores(q.float() / self._range, k) * self._range

    @but(when=lambda causal: causal)
    def prefill_plan_key_has_ends_only__before_batch(self, query_start_loc, key_start_loc):
        return [kept(self, bases.ends_of(torch.tensor(query_start_loc).diff().tolist()), query_start_loc)] * 2

    def refusal_leaves_the_default_dtype__batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        result = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        torch.set_default_dtype(before)
        return result
