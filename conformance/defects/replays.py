"""Replays that keep something of the batch that was captured, and refusals that come too late or leave traces."""

from itertools import pairwise

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.defects.bases import CapturableDecode, CapturablePrefill, EagerLayer
from mla_conformance.defects.known import known_defect


class _Replays(CapturableDecode):
    """Knows the metadata of the capture again by the address of its buffers."""

    def prepare_metadata(self, decode_metadata):
        lengths = decode_metadata.seq_lens
        captured = self.__dict__.setdefault("captured", {})  # with the buffer, so that no other one gets its address
        key = (lengths.data_ptr(), lengths.shape)
        self._replays = key in captured
        table = decode_metadata.block_table.clone()
        _, self._first_lengths, self._first_table = captured.setdefault(key, (lengths, lengths.tolist(), table))
        super().prepare_metadata(decode_metadata)


@known_defect("decode-replay-keeps-the-ranks-of-lengths", killed_by="cuda_graph")
class RanksOfTheCapture(_Replays):
    """Rows are ranked by length when they are captured, and no row of a replay may be longer than those before it."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        longer = [lengths[row] for row in range(len(first)) if first[row] > first[request] and lengths[row]]
        return super()._attend(q, request, min([seq_len, *longer]), kv_cache, k_scale)


@known_defect("decode-replay-takes-one-token-for-padding", killed_by="cuda_graph")
class OneTokenIsPadding(_Replays):
    """In a replay, a sequence of one token is taken for a row of padding."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        return super()._attend(q, request, 0 if self._replays and seq_len == 1 else seq_len, kv_cache, k_scale)


@known_defect("decode-replay-keeps-pages-of-equal-lengths", killed_by="cuda_graph")
class PagesOfTheCapture(_Replays):
    """Where the lengths of a batch change, only the rows whose own length does are given their pages anew."""

    def _blocks(self, request, pages):
        lengths, first = self._decode_metadata.seq_lens.tolist(), self._first_lengths
        kept = lengths != first and lengths[request] == first[request] > 0
        return self._first_table[request][pages].long() if kept else super()._blocks(request, pages)


@known_defect("decode-replay-outgrows-the-splits-of-the-capture", killed_by="cuda_graph")
class SplitsOfTheCapture(_Replays):
    """A graph has splits for four times the pages that its longest sequence had when it was captured, and no more."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        page = kv_cache.shape[1]
        room = 4 * -(-max(self._first_lengths) // page) * page
        return super()._attend(q, request, min(seq_len, room) if self._replays else seq_len, kv_cache, k_scale)


class _HalfTables(MLACommonState):
    """Fills half of the columns of a graph's block table."""

    def prepare_graph_input_buffers(self, input_buffers, attn_metadata, is_encoder_decoder_model=False):
        super().prepare_graph_input_buffers(input_buffers, attn_metadata, is_encoder_decoder_model)
        table = input_buffers["block_tables"]
        table[:, table.shape[1] // 2 :] = -1


@known_defect("layer-replay-fills-half-of-the-block-table", killed_by="graph_replay")
class HalfOfTheTable(EagerLayer):
    """Half of a graph's block table is filled, so that a replay may not outgrow half of what the capture admits."""

    @staticmethod
    def get_state_cls():
        return _HalfTables


@known_defect("prefill-replay-keeps-the-ranks-of-lengths", killed_by="cuda_graph")
class PrefillRanksOfTheCapture(CapturablePrefill):
    """Requests are ranked by length when they are captured, and none of a replay is longer than those before it."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        lengths = [end - start for start, end in pairwise(query_start_loc)]
        first = self.__dict__.setdefault("first", {}).setdefault(q.data_ptr(), (q, lengths))[1]
        for request, start in enumerate(query_start_loc[:-1]):
            longer = [lengths[row] for row in range(len(first)) if first[row] > first[request] and lengths[row]]
            output[start + min([lengths[request], *longer]) : start + lengths[request]] = 0.0
        return output, lse


@known_defect("refusal-after-the-output-was-cleared", killed_by="refusals")
class ClearsBeforeItRefuses(EagerPrefillBackend):
    """The output tensor is cleared before anybody looks at what was asked for."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        if out is not None:
            out.zero_()
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("refusal-leaves-the-default-dtype", killed_by="refusals")
class LeavesItsDtype(EagerPrefillBackend):
    """The default dtype is set for the call, and not put back where the call is refused."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        result = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        torch.set_default_dtype(before)
        return result


@known_defect("decode-refusal-leaves-gradients-off", killed_by="refusals")
class LeavesGradientsOff(EagerDecodeBackend):
    """A decode turns gradients off, and not on again where it is refused."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        torch.set_grad_enabled(before)
        return result
