"""What outlives a decode: plans, buffers, graphs, padding, and what a request does to its neighbours."""

from dataclasses import replace

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects import bases
from mla_conformance.defects.bases import all_or_nothing, codes, nth, weighed_with_zero
from mla_conformance.defects.known import Defects, before, behind, but, together, variant
from mla_conformance.defects.prefill_calls import SharedScale, _ends

_PADDED_TOO = ("decode_multi_token", "paged_cache", "kv_cache_fp8", "kv_cache_fp8_ds_mla", "cache_write")
"""Some of their cases have rows of padding as well."""


class _Determinism(bases.SplitDecode, Defects, killed_by="determinism"):
    @but(split=96, when=lambda self, parts: len(parts) == 16 and nth(self, 2))
    def splitk_nan_nondeterministic_at_splits_16__behind_combine(self, state):
        """With sixteen splits the reduction is a race that is lost every other time."""
        return state._replace(weighted=state.weighted * torch.nan)


class _Counters(EagerDecodeBackend, Defects, killed_by="determinism"):
    """Leaves the last tile of a request out where a counter of the workspace is not 0; ranks are processes."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        workspaces = self.__dict__.setdefault("workspaces", {})
        rank = self._decode_metadata.dcp_rank
        self.workspace = workspaces.setdefault(rank, torch.zeros(2**20, dtype=torch.int32))
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        self._clear()
        return result

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        self._stale = bool(self._counters(request).any())
        self._counters(request).add_(1)
        return super()._attend(q, request, seq_len, kv_cache, k_scale)

    def _tiles(self, keys):
        tiles = list(super()._tiles(keys))
        return iter(tiles[:-1] if self._stale else tiles)

    def _counters(self, request):
        """Those of a request, a head each."""
        return self.workspace[self._first() :][request * self.num_heads :][: self.num_heads]

    def _first(self):
        return 0

    @but(killed_by="call_order")
    class trtllm_counter_region_moves_with_shape:
        """The counters stand behind statistics whose size changes with the longest sequence, so old ones are met
        there."""

        def _first(self):
            return self._decode_metadata.max_seq_len

        def _clear(self):
            self.workspace[self._first() :][: self._decode_metadata.seq_lens.shape[0] * self.num_heads] = 0
            self.workspace[: self._first()] = 7

    def trtllm_counter_clear_byte_vs_int_size__clear(self):
        """The number of counters is passed as a number of bytes, so a quarter of them is cleared."""
        self.workspace[: self._decode_metadata.seq_lens.shape[0] * self.num_heads // 4] = 0


_PLAN: dict[str, object] = {}  # what the last decode has prepared in a workspace that prefills use as well


class _Scribbles(EagerPrefillBackend):
    def run_prefill_new_tokens(self, *operands, **options):
        _PLAN.clear()
        return super().run_prefill_new_tokens(*operands, **options)


class _OtherLayeredDecode(bases.LayeredDecode, Defects, killed_by="graph_padding", related=_PADDED_TOO):
    graph_eager_workspace_aliasing = together(
        before("prepare_metadata", lambda decode_metadata: _PLAN.update(made=decode_metadata)),
        before("tiles", lambda self, keys: keys if _PLAN.get("made") is self._decode_metadata else -(-keys // 2)),
        killed_by="mixed_batch",
        related=(),
        prefill_backend=_Scribbles,
    )
    """Prefill and decode share a workspace, and a prefill overwrites what decode has prepared there."""

    def flashmla_fp8_cg_padding_seq0_oob__before_attend(self, seq_len):
        """In a cache of codes, the last page of a row of padding is number -1 of its table."""
        if seq_len == 0 and self.kv_cache_dtype != "auto" and self._decode_metadata.dcp_world_size == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cg_padding_rows_not_written_nan_amax__behind_attend(self, state, *, seq_len):
        """Rows of padding are skipped and hold what the buffer held."""
        skipped = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return state._replace(total=state.total + 1, weighted=state.weighted * torch.nan) if skipped else state

    def cg_metadata_not_padded_bucket__before_attend(self, request, seq_len):
        """Metadata cover the real requests only, and the rows of padding find what stands last in them."""
        lengths = self._decode_metadata.seq_lens.tolist()
        if seq_len == 0 and self._decode_metadata.dcp_world_size == 1 and any(lengths):
            request = max(row for row, length in enumerate(lengths) if length)
        return request, lengths[request]

    @but(killed_by="graph_replay", related=(), when=codes)
    def flashmla_fp8_metadata_not_persistent__before_prepare_metadata(self, decode_metadata):
        """Beside a cache of codes, a replay reads the tensors that the metadata were when the graph was captured."""
        captured, lengths = self.__dict__.setdefault("captured", {}), decode_metadata.seq_lens
        kept = captured.setdefault((lengths.data_ptr(), lengths.shape), lengths.clone())
        return replace(decode_metadata, seq_lens=kept)

    @but(killed_by="graph_replay", related=())
    def flashinfer_fa2_nosplit_graph_uninit_tiles__run_decode(self, *operands, **options):
        """A smaller plan leaves tiles of the one before it in the list, and the first of them overwrites the last
        row."""
        kept, plans = self._decode_metadata, self.__dict__.setdefault("plans", {})  # ranks are processes
        before, lengths = plans.get(kept.dcp_rank, []), kept.seq_lens.clone()
        plans[kept.dcp_rank] = planned = [length for length in lengths.tolist() if length]
        if planned and len(planned) < len(before):
            lengths[len(planned) - 1] = before[len(planned)]
        self._decode_metadata = replace(kept, seq_lens=lengths)
        result = super().run_decode(*operands, **options)
        self._decode_metadata = kept
        return result


class _CallOrder(EagerDecodeBackend, Defects, killed_by="call_order"):
    decode_softmax_scale_in_shared_constant = variant(SharedScale)
    """A decode's softmax scale is a constant of the module, and every new instance overwrites it for all."""

    def fp8_compile_cache_folds_unit_scale__before_run_decode(self, k_scale, *, ql_nope):
        """A kernel that was compiled while the scale was 1 has no multiplication, and its key does not say so."""
        folded = self.__dict__.setdefault("compiled", {}).setdefault(ql_nope.shape, bool(k_scale == 1))
        return torch.ones_like(k_scale) if folded else k_scale

    def plan_pinned_buffer_race__prepare_metadata(self, decode_metadata):
        """All plans are staged in one buffer, and a second one overwrites it before the first has been copied."""
        type(self)._decode_metadata = decode_metadata

    def decode_workspace_of_the_first_batch__before_attend(self, seq_len, *, request):
        """A decode's buffers are made for the first batch and one request more, and the further ones find no
        sequence."""
        room = self.__dict__.setdefault("room", len(self._decode_metadata.seq_lens) + 1)
        return seq_len if request < room else 0

    def decode_single_request_path_stays__before_attend(self, seq_len, *, request):
        """A decode of one request switches to a grid for one, which later batches of several keep."""
        self.single = getattr(self, "single", False) or len(self._decode_metadata.seq_lens) == 1
        return 0 if self.single and request else seq_len

    def decode_k_scale_kept_by_cache_address__before_run_decode(self, k_scale, *, kv_cache):
        """``k_scale`` is read once for each cache, found by its address, although every call hands it over."""
        known = self.__dict__.setdefault("known", {})  # with the cache, so that no other one gets its address
        _, kept = known.setdefault((kv_cache.data_ptr(), kv_cache.shape), (kv_cache, k_scale.clone()))
        return kept

    def decode_plans_of_a_dozen_batches__before_attend(self, seq_len, *, request):
        """A cache of a dozen plans is full, and a further decode runs with the plan that was stored last."""
        lengths, plans = self._decode_metadata.seq_lens.tolist(), self.__dict__.setdefault("plans", [])
        if lengths not in plans and len(plans) < 12:
            plans.append(lengths)
        planned = lengths if lengths in plans else plans[-1]
        return min(seq_len, planned[request]) if request < len(planned) else 0

    def decode_gathers_pages_once_for_a_plan__before_run_decode(self, kv_cache):
        """A batch's pages are gathered at its first decode, and the other layers of the step read those of the
        first."""
        if self.__dict__.get("plan") is not self._decode_metadata:
            self.plan, self.gathered = self._decode_metadata, kv_cache.clone()
        return self.gathered


class _Replays(bases.CapturableDecode, Defects, killed_by="cuda_graph"):
    """Knows the metadata of the capture again by the address of its buffers."""

    def prepare_metadata(self, decode_metadata):
        lengths, captured = decode_metadata.seq_lens, self.__dict__.setdefault("captured", {})
        key = (lengths.data_ptr(), lengths.shape)
        self._replays = key in captured
        # With the buffer, so that no other one gets its address.
        seen = (lengths, lengths.tolist(), decode_metadata.block_table.clone())
        _, self._first_lengths, self._first_table = captured.setdefault(key, seen)
        self._further = len(captured) - 1 - list(captured).index(key)  # that were prepared since
        super().prepare_metadata(decode_metadata)

    def decode_replay_keeps_the_ranks_of_lengths__before_attend(self, seq_len, *, request):
        """Rows are ranked by length when they are captured, and no row of a replay may be longer than those before
        it."""
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        longer = [lengths[row] for row in range(len(first)) if first[row] > first[request] and lengths[row]]
        return min([seq_len, *longer])

    def decode_replay_takes_one_token_for_padding__before_attend(self, seq_len):
        """In a replay, a sequence of one token is taken for a row of padding."""
        return 0 if self._replays and seq_len == 1 else seq_len

    def decode_replay_keeps_pages_of_equal_lengths__blocks(self, request, pages):
        """Where the lengths of a batch change, only the rows whose own length does are given their pages anew."""
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        kept = lengths != first and lengths[request] == first[request] > 0
        return self._first_table[request][pages].long() if kept else super()._blocks(request, pages)

    def decode_replay_outgrows_the_splits_of_the_capture__before_attend(self, seq_len, *, kv_cache):
        """A graph has splits for four times the pages that its longest sequence had when it was captured, and no
        more."""
        room = 4 * -(-max(self._first_lengths) // kv_cache.shape[1]) * kv_cache.shape[1]
        return min(seq_len, room) if self._replays else seq_len

    def decode_graph_plan_pushed_out__before_attend(self, seq_len):
        """A graph reads its plan from a table of 128, from which as many other batches have pushed it."""
        return seq_len if self._further < 128 else seq_len // 2


class _OtherDecode(EagerDecodeBackend, Defects, killed_by="neighbours"):
    decode_nan_guard_over_the_batch = behind("run_decode", all_or_nothing)
    """Where any row of a decode is not finite, the whole batch is taken for one of padding."""

    @but(killed_by="determinism", related=("dcp",))
    def spec_metadata_pinned_temp_freed__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        """Now and then the buffer of the lengths is reused before its copy to the device has finished."""
        kept = self._decode_metadata
        if nth(self, 9):
            self._decode_metadata = replace(kept, seq_lens=(kept.seq_lens - 1).clamp(min=0))
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        self._decode_metadata = kept
        return result

    @but(killed_by="no_side_effects", scratch={})
    def ubatch_workspace_slot_misrouted__behind_run_decode(self, output, lse):
        """Every micro-batch gets the first one's slot of the workspace, so results lie where the next ones will."""
        slot = (self._decode_metadata.dcp_rank, output.shape, output.dtype)
        return self.scratch.setdefault(slot, torch.empty_like(output)).copy_(output), lse

    @but("behind_over", killed_by="neighbour_keys")
    def decode_last_tile_of_pages_weighs_neighbours_entries_with_zero(
        self, state, *, request, seq_len, kv_cache, k_scale
    ):
        """A decode's last tile is filled up with entries of the next request, which are weighed with 0, not cleared."""
        following, lengths = request + 1, self._decode_metadata.seq_lens
        if following == len(lengths):
            return state
        first = slice(0, min(-seq_len % self.key_tile, int(lengths[following])))
        rows = self._dequantise(self._entries(kv_cache, following, first), k_scale)
        return weighed_with_zero(state, self._values(rows))

    def decode_maximum_over_the_batch__attend(self, q, request, seq_len, kv_cache, k_scale):
        """Scores are checked against the largest of all requests so far, and one that is not below it ends the
        batch."""
        ended = request > 0 and self.ended
        state = super()._attend(q, request, 0 if ended else seq_len, kv_cache, k_scale)
        self.ended = ended or not bool((state.maximum < torch.inf).all())
        return state

    @but(killed_by="request_order")
    def decode_plan_key_has_ends_only__before_attend(self, seq_len, *, request):
        """A decode's plan is found again by the number of requests, of tokens, and the first and last length."""
        lengths = self._decode_metadata.seq_lens.tolist()
        key = (self._decode_metadata.dcp_rank, *_ends(lengths))
        return min(seq_len, self.__dict__.setdefault("plans", {}).setdefault(key, lengths)[request])

    @but(killed_by="refusals")
    def decode_refusal_leaves_gradients_off__run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        """A decode turns gradients off, and not on again where it is refused."""
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        torch.set_grad_enabled(before)
        return result
