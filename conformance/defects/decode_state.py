"""What outlives a decode or lies with other ranks; configurations, padded batches and replays that it has to serve."""

from dataclasses import replace
from typing import ClassVar

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.backends.online_softmax import SoftmaxState
from mla_conformance.defects.bases import LayeredDecode
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


@known_defect("spec-metadata-pinned-temp-freed", killed_by="determinism", related=("dcp",))
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


@known_defect("mistral4-triton-mla-latent-dims-hardcoded", killed_by="decode")
class LatentsOf512(EagerDecodeBackend):
    """The tile of a latent is hard-wired to 512 columns, and other models do not compile."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_lora_rank != 512:
            raise RuntimeError(f"arange's range must be a power of two: 512 + 64 columns for L = {self.kv_lora_rank}")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect("aiter-qh64-pagesize1-fault", killed_by="paged_cache")
class SinglePages(EagerDecodeBackend):
    """With pages of one token, a batch of 16 requests or more reads out of bounds."""

    def _entries(self, kv_cache, request, tile):
        if kv_cache.shape[1] == 1 and self._decode_metadata.seq_lens.shape[0] >= 16:
            raise RuntimeError("memory access fault: page not present")
        return super()._entries(kv_cache, request, tile)


@known_defect("aiter-no-kernel-bf16q-fp8kv-qlen5", killed_by="kv_cache_fp8")
class FourTokensBesideCodes(EagerDecodeBackend):
    """Beside a cache of codes there is no kernel for more than four query tokens."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if self.kv_cache_dtype == "fp8" and q.shape[0] > 4:
            raise RuntimeError(f"no kernel for 16-bit queries, codes and {q.shape[0]} query tokens")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


_PADDED_TOO = ("decode_multi_token", "paged_cache", "kv_cache_fp8", "kv_cache_fp8_ds_mla", "cache_write")
"""Some of their cases have rows of padding as well."""


@known_defect("flashmla-fp8-cg-padding-seq0-oob", killed_by="graph_padding", related=_PADDED_TOO)
class LastPageOfNothing(LayeredDecode):
    """In a cache of codes, the last page of a row of padding is number -1 of its table."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        if seq_len == 0 and self.kv_cache_dtype != "auto" and self._decode_metadata.dcp_world_size == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super()._attend(q, request, seq_len, kv_cache, k_scale)


@known_defect("cg-padding-rows-not-written-nan-amax", killed_by="graph_padding", related=_PADDED_TOO)
class PaddingUnwritten(LayeredDecode):
    """Rows of padding are skipped and hold what the buffer held."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        state = super()._attend(q, request, seq_len, kv_cache, k_scale)
        skipped = seq_len == 0 and self._decode_metadata.dcp_world_size == 1
        return state._replace(total=state.total + 1, weighted=state.weighted * torch.nan) if skipped else state


@known_defect("cg-metadata-not-padded-bucket", killed_by="graph_padding", related=_PADDED_TOO)
class MetadataOfRealRows(LayeredDecode):
    """Metadata cover the real requests only, and the rows of padding find what stands last in them."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        lengths = self._decode_metadata.seq_lens.tolist()
        self._row = request
        if seq_len == 0 and self._decode_metadata.dcp_world_size == 1 and any(lengths):
            self._row = max(row for row, length in enumerate(lengths) if length)
        return super()._attend(q, request, lengths[self._row], kv_cache, k_scale)

    def _blocks(self, request, pages):
        return super()._blocks(self._row, pages)


@known_defect("flashmla-fp8-metadata-not-persistent", killed_by="graph_replay")
class MetadataOfTheCapture(LayeredDecode):
    """Beside a cache of codes, a replay reads the tensors that the metadata were when the graph was captured."""

    def prepare_metadata(self, decode_metadata):
        captured = self.__dict__.setdefault("captured", {})
        lengths = decode_metadata.seq_lens
        if self.kv_cache_dtype == "fp8":
            lengths = captured.setdefault((lengths.data_ptr(), lengths.shape), lengths.clone())
        super().prepare_metadata(replace(decode_metadata, seq_lens=lengths))


@known_defect("flashinfer-fa2-nosplit-graph-uninit-tiles", killed_by="graph_replay")
class TilesOfThePlanBefore(LayeredDecode):
    """A smaller plan leaves tiles of the one before it in the list, and the first of them overwrites the last row."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        kept = self._decode_metadata
        self._decode_metadata = replace(kept, seq_lens=self._lengths(kept))
        result = super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        self._decode_metadata = kept
        return result

    def _lengths(self, metadata):
        plans = self.__dict__.setdefault("plans", {})  # ranks are processes
        before, lengths = plans.get(metadata.dcp_rank, []), metadata.seq_lens.clone()
        plans[metadata.dcp_rank] = planned = [length for length in lengths.tolist() if length]
        if planned and len(planned) < len(before):
            lengths[len(planned) - 1] = before[len(planned)]
        return lengths


class _Scribbles(EagerPrefillBackend):
    """Uses the workspace in which a decode has left its plan."""

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None):
        OneWorkspace.plan = None
        return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)


@known_defect("graph-eager-workspace-aliasing", killed_by="mixed_batch")
class OneWorkspace(LayeredDecode):
    """Prefill and decode share a workspace, and a prefill overwrites what decode has prepared there."""

    prefill_backend = _Scribbles
    plan = None

    def prepare_metadata(self, decode_metadata):
        OneWorkspace.plan = decode_metadata
        super().prepare_metadata(decode_metadata)

    def _tiles(self, keys):
        return super()._tiles(keys if self.plan is self._decode_metadata else -(-keys // 2))
