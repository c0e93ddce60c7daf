"""What outlives a decode: plans, buffers, graphs, padding, and what a request does to its neighbours."""

from dataclasses import replace

import torch

from mla_conformance.backends import eager, eager_decode
from mla_conformance.defects import bases
from mla_conformance.defects.bases import all_or_nothing, codes, kept, nth, weighed_with_zero
from mla_conformance.defects.known import Defects, before, behind, but, together, variant


class _Counters(eager_decode.EagerDecodeBackend, Defects):
    """Leaves the last tile of a request out where a counter of the workspace is not 0; ranks are processes."""

    def run_decode(self, *operands):
        self.workspace = kept(self, self._decode_metadata.dcp_rank, torch.zeros(2**20, dtype=torch.int32))
        result = super().run_decode(*operands)
        self._clear()
        return result

    def _attend(self, q, request, *further):
        counters = self.workspace[self._first() :][request * self.num_heads :][: self.num_heads]
        self._stale = bool(counters.any())
        counters.add_(1)
        return super()._attend(q, request, *further)

    def _tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return iter(tiles[:-1] if self._stale else tiles)

    def _first(self):
        return 0

    class trtllm_counter_region_moves_with_shape:
        def _first(self):
            return self._decode_metadata.max_seq_len

        def _clear(self):
            self.workspace[self._first() :][: self._decode_metadata.seq_lens.shape[0] * self.num_heads] = 0
            self.workspace[: self._first()] = 7

    def trtllm_counter_clear_byte_vs_int_size__clear(self):
        self.workspace[: self._decode_metadata.seq_lens.shape[0] * self.num_heads // 4] = 0


_PLAN: dict[str, object] = {}  # what the last decode has prepared in a workspace that prefills use as well


class _Scribbles(eager.EagerPrefillBackend):
    def run_prefill_new_tokens(self, *operands, **options):
        _PLAN.clear()
        return super().run_prefill_new_tokens(*operands, **options)


def _run_with(self, lengths, *operands):
    """What a decode returns that reads these lengths."""
    given = self._decode_metadata
    self._decode_metadata = replace(given, seq_lens=lengths)
    result = eager_decode.EagerDecodeBackend.run_decode(self, *operands)
    self._decode_metadata = given
    return result


class _OtherLayeredDecode(bases.LayeredDecode, Defects):
    graph_eager_workspace_aliasing = together(
        before("prepare_metadata", lambda decode_metadata: _PLAN.update(made=decode_metadata)),
        before("tiles", lambda self, keys: keys if _PLAN.get("made") is self._decode_metadata else -(-keys // 2)),
        prefill_backend=_Scribbles,
    )

    def flashmla_fp8_cg_padding_seq0_oob__before_attend(self, seq_len):
        if seq_len == 0 and self.kv_cache_dtype != "auto" and self._decode_metadata.dcp_world_size == 1:
            raise RuntimeError(bases.ILLEGAL_ACCESS)

    def cg_padding_rows_not_written_nan_amax__behind_attend(self, state, *, seq_len):
        skipped = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return state._replace(total=state.total + 1, weighted=state.weighted * torch.nan) if skipped else state

    def cg_metadata_not_padded_bucket__before_attend(self, request, seq_len):
        lengths = self._decode_metadata.seq_lens.tolist()
        if seq_len == 0 and self._decode_metadata.dcp_world_size == 1 and any(lengths):
            request = max(row for row, length in enumerate(lengths) if length)
        return request, lengths[request]

    @but(when=codes)
    def flashmla_fp8_metadata_not_persistent__before_prepare_metadata(self, decode_metadata):
        lengths = decode_metadata.seq_lens
        return replace(decode_metadata, seq_lens=kept(self, (lengths.data_ptr(), lengths.shape), lengths.clone()))

    def flashinfer_fa2_nosplit_graph_uninit_tiles__run_decode(self, *operands):
        plans, rank = kept(self, "plans", {}), self._decode_metadata.dcp_rank  # ranks are processes
        before, lengths = plans.get(rank, []), self._decode_metadata.seq_lens.clone()
        plans[rank] = planned = [length for length in lengths.tolist() if length]
        if planned and len(planned) < len(before):
            lengths[len(planned) - 1] = before[len(planned)]
        return _run_with(self, lengths, *operands)


class _Replays(bases.Capturable, eager_decode.EagerDecodeBackend, Defects):
    """Knows the metadata of the capture again by the address of its buffers."""

    def prepare_metadata(self, decode_metadata):
        lengths, captured = decode_metadata.seq_lens, kept(self, "captured", {})
        key = (lengths.data_ptr(), lengths.shape)
        self._replays = key in captured
        # With the buffer, so that no other one gets its address.
        seen = (lengths, lengths.tolist(), decode_metadata.block_table.clone())
        _, self._first_lengths, self._first_table = captured.setdefault(key, seen)
        self._further = len(captured) - 1 - list(captured).index(key)  # that were prepared since
        super().prepare_metadata(decode_metadata)

    def decode_replay_keeps_the_ranks_of_lengths__before_attend(self, seq_len, *, request):
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        longer = [lengths[row] for row in range(len(first)) if first[row] > first[request] and lengths[row]]
        return min([seq_len, *longer])

    def decode_replay_takes_one_token_for_padding__before_attend(self, seq_len):
        return 0 if self._replays and seq_len == 1 else seq_len

    def decode_replay_keeps_pages_of_equal_lengths__blocks(self, request, pages):
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        stale = lengths != first and lengths[request] == first[request] > 0
        return self._first_table[request][pages].long() if stale else super()._blocks(request, pages)

    def decode_replay_outgrows_the_splits_of_the_capture__before_attend(self, seq_len, *, kv_cache):
        room = 4 * -(-max(self._first_lengths) // kv_cache.shape[1]) * kv_cache.shape[1]
        return min(seq_len, room) if self._replays else seq_len

    def decode_graph_plan_pushed_out__before_attend(self, seq_len):
        return seq_len if self._further < 128 else seq_len // 2


class _Decode(eager_decode.EagerDecodeBackend, Defects):
    @but(split=96, on=(bases.SplitDecode,), when=lambda self, parts: len(parts) == 16 and nth(self, 2))
    def splitk_nan_nondeterministic_at_splits_16__behind_combine(self, state):
        return state._replace(weighted=state.weighted * torch.nan)

    decode_softmax_scale_in_shared_constant = variant(bases.SharedScale)

    def fp8_compile_cache_folds_unit_scale__before_run_decode(self, k_scale, *, ql_nope):
        return torch.ones_like(k_scale) if kept(self, ql_nope.shape, bool(k_scale == 1)) else k_scale

    def plan_pinned_buffer_race__prepare_metadata(self, decode_metadata):
        type(self)._decode_metadata = decode_metadata

    def decode_workspace_of_the_first_batch__before_attend(self, seq_len, *, request):
        return seq_len if request < kept(self, "room", len(self._decode_metadata.seq_lens) + 1) else 0

    def decode_single_request_path_stays__before_attend(self, seq_len, *, request):
        self.single = getattr(self, "single", False) or len(self._decode_metadata.seq_lens) == 1
        return 0 if self.single and request else seq_len

    def decode_k_scale_kept_by_cache_address__before_run_decode(self, k_scale, *, kv_cache):
        # With the cache, so that no other one gets its address.
        return kept(self, (kv_cache.data_ptr(), kv_cache.shape), (kv_cache, k_scale.clone()))[1]

    class decode_k_scale_of_the_first_layer_of_a_step:
        def prepare_metadata(self, decode_metadata):
            super().prepare_metadata(decode_metadata)
            self.k_scale = None

        def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
            self.k_scale = k_scale.clone() if self.k_scale is None else self.k_scale
            return super().run_decode(ql_nope, q_pe, kv_cache, self.k_scale)

    def decode_plans_of_a_dozen_batches__before_attend(self, seq_len, *, request):
        lengths, plans = self._decode_metadata.seq_lens.tolist(), kept(self, "plans", [])
        if lengths not in plans and len(plans) < 12:
            plans.append(lengths)
        planned = lengths if lengths in plans else plans[-1]
        return min(seq_len, planned[request]) if request < len(planned) else 0

    def decode_gathers_pages_once_for_a_plan__before_run_decode(self, kv_cache):
        if self.__dict__.get("plan") is not self._decode_metadata:
            self.plan, self.gathered = self._decode_metadata, kv_cache.clone()
        return self.gathered

    decode_nan_guard_over_the_batch = behind("run_decode", all_or_nothing)

    def spec_metadata_pinned_temp_freed__run_decode(self, *operands):
        lengths = self._decode_metadata.seq_lens
        return _run_with(self, (lengths - 1).clamp(min=0) if nth(self, 9) else lengths, *operands)

    @but(scratch={})
    def ubatch_workspace_slot_misrouted__behind_run_decode(self, output, lse):
        slot = (self._decode_metadata.dcp_rank, output.shape, output.dtype)
        return self.scratch.setdefault(slot, torch.empty_like(output)).copy_(output), lse

    @but("behind_over")
    def decode_last_tile_of_pages_weighs_neighbours_entries_with_zero(
        self, state, *, request, seq_len, kv_cache, k_scale
    ):
        following, lengths = request + 1, self._decode_metadata.seq_lens
        if following == len(lengths):
            return state
        first = slice(0, min(-seq_len % self.key_tile, int(lengths[following])))
        rows = self._dequantise(self._entries(kv_cache, following, first), k_scale)
        return weighed_with_zero(state, self._values(rows))

    def decode_maximum_over_the_batch__attend(self, q, request, seq_len, kv_cache, k_scale):
        ended = request > 0 and self.ended
        state = super()._attend(q, request, 0 if ended else seq_len, kv_cache, k_scale)
        self.ended = ended or not bool((state.maximum < torch.inf).all())
        return state

    def decode_plan_key_has_ends_only__before_attend(self, seq_len, *, request):
        lengths = self._decode_metadata.seq_lens.tolist()
        return min(seq_len, kept(self, (self._decode_metadata.dcp_rank, *bases.ends_of(lengths)), lengths)[request])

    def decode_refusal_leaves_gradients_off__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        torch.set_grad_enabled(before)
        return result
