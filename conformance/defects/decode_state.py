"""What lies with other ranks or outlives a decode: local bounds, counters of a workspace, staging buffers, scratch."""

from dataclasses import replace
from typing import ClassVar

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.known import known_defect


@known_defect("dcp-empty-owner-zero-times-nan", killed_by="dcp")
class NanOfARankWithoutKeys(EagerDecodeBackend):
    """A rank that holds no key of a request returns 0 / 0, which no factor of 0 removes from the sum."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        if self._decode_metadata.dcp_world_size > 1:
            output = output.masked_fill(lse.mT.unsqueeze(-1) == -torch.inf, torch.nan)
        return output, lse


@known_defect("dcp-causal-mask-on-local-len", killed_by="dcp")
class LocalBound(EagerDecodeBackend):
    """The causal bound counts the tokens of this rank back from its own last one."""

    def _visible(self, queries, request, seq_len, tile):
        last = torch.arange(seq_len - queries, seq_len).unsqueeze(1)
        return torch.arange(tile.start, tile.stop) <= last


@known_defect("leading-masked-chunk-nan-poisons-row", killed_by="dcp")
class UnguardedMaximum(EagerDecodeBackend):
    """A first tile without a visible key leaves a maximum of -inf, and -inf minus -inf stays in the row for ever."""

    def _accumulate(self, state, scores, v):
        maximum = torch.maximum(state.maximum, scores.amax(dim=-1, keepdim=True))
        decay = (state.maximum - maximum).exp().masked_fill(state.total == 0, 0.0)
        p = (scores - maximum).exp()
        weighted = torch.einsum("nts,snv->ntv", self._round_p(p, v.dtype), v.float())
        return SoftmaxState(maximum, state.total * decay + p.sum(-1, keepdim=True), state.weighted * decay + weighted)


class _Counters(EagerDecodeBackend):
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
        start = self._first() + request * self.num_heads
        return self.workspace[start : start + self.num_heads]

    def _first(self):
        """Where the counters of the call begin."""
        return 0

    def _clear(self):
        raise NotImplementedError


@known_defect("trtllm-counter-region-moves-with-shape", killed_by="call_order")
class MovingCounters(_Counters):
    """The counters stand behind statistics whose size changes with the longest sequence, so old ones are met there."""

    def _first(self):
        return self._decode_metadata.max_seq_len

    def _clear(self):
        start = self._first()
        self.workspace[start : start + self._decode_metadata.seq_lens.shape[0] * self.num_heads] = 0
        self.workspace[:start] = 7


@known_defect("trtllm-counter-clear-byte-vs-int-size", killed_by="determinism")
class QuarterCleared(_Counters):
    """The number of counters is passed as a number of bytes, so a quarter of them is cleared."""

    def _clear(self):
        self.workspace[: self._decode_metadata.seq_lens.shape[0] * self.num_heads // 4] = 0


@known_defect("spec-metadata-pinned-temp-freed", killed_by="determinism")
class FreedLengths(EagerDecodeBackend):
    """Now and then the buffer of the lengths is reused before its copy to the device has finished."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self.number = getattr(self, "number", 0) + 1
        kept = self._decode_metadata
        if self.number % 9 == 0:
            self._decode_metadata = replace(kept, seq_lens=(kept.seq_lens - 1).clamp(min=0))
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        self._decode_metadata = kept
        return result


@known_defect("plan-pinned-buffer-race", killed_by="call_order")
class OneStagingBuffer(EagerDecodeBackend):
    """All plans are staged in one buffer, and a second one overwrites it before the first has been copied."""

    staged: ClassVar[MLACommonDecodeMetadata]

    def prepare_metadata(self, decode_metadata):
        OneStagingBuffer.staged = decode_metadata
        super().prepare_metadata(decode_metadata)

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        self._decode_metadata = self.staged
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)


@known_defect("ubatch-workspace-slot-misrouted", killed_by="no_side_effects")
class SharedScratch(EagerDecodeBackend):
    """Every micro-batch gets the first one's slot of the workspace, so results lie where the next ones will."""

    scratch: ClassVar[dict[object, torch.Tensor]] = {}

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        output, lse = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        slot = (self._decode_metadata.dcp_rank, output.shape, output.dtype)
        return self.scratch.setdefault(slot, torch.empty_like(output)).copy_(output), lse
