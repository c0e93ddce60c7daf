"""Wrong LSEs beside right outputs, and requests that have no keys or no queries."""

import math
from itertools import pairwise

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


@known_defect("lse-base2-merged-as-natural-prefix-chunk", killed_by="lse")
class Base2ContextLse(EagerPrefillBackend):
    """The LSE of context chunks is in base 2."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        return output, lse / math.log(2)


@known_defect("lse-base-switch-without-abi-change-cutedsl", killed_by="lse")
class Base2InLargeBatches(EagerPrefillBackend):
    """The LSE is in base 2 for more than eight requests, where another kernel serves the call."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output, lse / math.log(2) if len(query_start_loc) > 9 else lse


@known_defect("hopper-fmha-softmax-stats-drop-qscaling", killed_by="lse")
class LseOfDefaultScale(EagerPrefillBackend):
    """The LSE of context chunks is that of the scale d^-1/2; the output has the given scale."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, _ = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        given, self.scale = self.scale, q.shape[-1] ** -0.5
        _, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        self.scale = given
        return output, lse


@known_defect("lse-layout-tokens-heads-vs-heads-tokens", killed_by="lse")
class TransposedLse(EagerPrefillBackend):
    """The LSE is laid out [tokens, heads]."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output, lse.mT.contiguous()


@known_defect("rocm-varlen-lse-padded-layout", killed_by="lse")
class PaddedLse(EagerPrefillBackend):
    """The LSE comes padded to the longest request and is read as packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        lengths = [b - a for a, b in pairwise(query_start_loc)]
        padded = lse.new_zeros(len(lengths), self.num_heads, max(lengths))
        for request, (start, length) in enumerate(zip(query_start_loc, lengths, strict=False)):
            padded[request, :, :length] = lse[:, start : start + length]
        return output, padded.reshape(self.num_heads, -1)[:, : lse.shape[1]]


@known_defect("aiter-ps-prefill-final-lse-wrong", killed_by="lse")
class StaleLseOfUnsplitRequests(EagerPrefillBackend):
    """Only the reduction of split keys writes the LSE; requests with few keys keep a stale one."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        locations = self._prefill_metadata.query_start_loc.tolist()
        keys = self._prefill_metadata.chunked_context.cu_seq_lens[chunk_idx].diff().tolist()
        for request, length in enumerate(keys):
            if 0 < length <= 16:
                lse[:, locations[request] : locations[request + 1]] = 0.0
        return output, lse


@known_defect("fa-splitkv-early-exit-lse-slot", killed_by="empty_rows")
class EarlyExitWritesPaddedSlot(EagerPrefillBackend):
    """A request without keys writes its -inf at the offset of a padded layout, over another row's LSE."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        longest = max(b - a for a, b in pairwise(query_start_loc))
        flat = lse.flatten()
        for request in range(len(key_start_loc) - 1):
            rows = slice(query_start_loc[request], query_start_loc[request + 1])
            if key_start_loc[request] == key_start_loc[request + 1] and rows.stop > rows.start:
                flat.view(lse.shape)[:, rows] = 0.0
                slot = min(request * self.num_heads * longest, len(flat) - 1)
                flat[slot : slot + rows.stop - rows.start] = -torch.inf
        return output, flat.view(lse.shape)


def _empty(query_start_loc: list[int], key_start_loc: list[int]) -> list[slice]:
    """Rows of the requests that have queries and no keys."""
    return [
        slice(query_start_loc[r], query_start_loc[r + 1])
        for r in range(len(key_start_loc) - 1)
        if key_start_loc[r] == key_start_loc[r + 1] and query_start_loc[r] < query_start_loc[r + 1]
    ]


@known_defect("empty-chunk-finite-lse-garbage-out", killed_by="empty_rows")
class FiniteLseWithGarbage(EagerPrefillBackend):
    """A row without keys has a finite LSE and an undefined output."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        for rows in _empty(query_start_loc, key_start_loc):
            output[rows], lse[:, rows] = torch.linspace(-1, 1, output.shape[-1]), 0.0
        return output, lse


@known_defect("trtllm-ragged-zero-len-kv-row", killed_by="empty_rows")
class UnwrittenRows(EagerPrefillBackend):
    """Rows without keys are never written: output and LSE hold what the buffer held."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        for rows in _empty(query_start_loc, key_start_loc):
            output[rows] = lse[:, rows] = 37.0
        return output, lse


@known_defect("paged-causal-fully-masked-finite-lse", killed_by="empty_rows")
class FiniteInfinity(EagerPrefillBackend):
    """Infinity is 5e4: a row without keys has an LSE of -5e4."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.clamp(min=-5e4)


@known_defect("fa2-maxseqlen1-swap-with-zero-len", killed_by="empty_rows")
class OneRowPerRequest(EagerPrefillBackend):
    """With a longest query of 1, row i is taken for request i, requests without queries included."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self._prefill_metadata.max_query_len == 1:
            total, requests = query_start_loc[-1], len(query_start_loc) - 1
            query_start_loc = [min(row, total) for row in range(requests + 1)]
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect("fa4-zero-len-k-hang-nan", killed_by="empty_rows")
class NanForWideHeads(EagerPrefillBackend):
    """A row without keys is 0 / 0 where V has 256 columns."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return (
            (output.masked_fill(lse.mT.unsqueeze(-1) == -torch.inf, torch.nan), lse)
            if output.shape[-1] == 256
            else (output, lse)
        )


@known_defect("skip-softmax-zero-len-div", killed_by="empty_rows")
class ThresholdOfEmptyRequest(EagerPrefillBackend):
    """A threshold divided by a length of 0 skips every tile of the whole batch."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if _empty(query_start_loc, key_start_loc):
            output, lse = torch.zeros_like(output), torch.full_like(lse, -torch.inf)
        return output, lse
