"""Requests that have no keys, or no queries."""

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


def _empty(query_start_loc: list[int], key_start_loc: list[int]) -> list[slice]:
    """Rows of the requests that have queries and no keys."""
    return [
        slice(query_start_loc[r], query_start_loc[r + 1])
        for r in range(len(key_start_loc) - 1)
        if key_start_loc[r] == key_start_loc[r + 1] and query_start_loc[r] < query_start_loc[r + 1]
    ]


@known_defect(
    "empty-chunk-finite-lse-garbage-out",
    killed_by="empty_rows",
    sources=("vllm-project/vllm#49294",),
)
class FiniteLseWithGarbage(EagerPrefillBackend):
    """A row without keys has a finite LSE and an undefined output."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        for rows in _empty(query_start_loc, key_start_loc):
            output[rows], lse[:, rows] = torch.linspace(-1, 1, output.shape[-1]), 0.0
        return output, lse


@known_defect(
    "trtllm-ragged-zero-len-kv-row",
    killed_by="empty_rows",
    sources=(
        "sgl-project/sglang#22688",
        "flashinfer-ai/flashinfer#3047",
        "flashinfer-ai/flashinfer#3779",
        "vllm-project/vllm#42426",
    ),
)
class UnwrittenRows(EagerPrefillBackend):
    """Rows without keys are never written: output and LSE hold what the buffer held."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        for rows in _empty(query_start_loc, key_start_loc):
            output[rows] = lse[:, rows] = 37.0
        return output, lse


@known_defect(
    "paged-causal-fully-masked-finite-lse",
    killed_by="empty_rows",
    sources=("flashinfer-ai/flashinfer#4452",),
)
class FiniteInfinity(EagerPrefillBackend):
    """Infinity is 5e4: a row without keys has an LSE of -5e4."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse.clamp(min=-5e4)


@known_defect(
    "fa2-maxseqlen1-swap-with-zero-len",
    killed_by="empty_rows",
    sources=("Dao-AILab/flash-attention#1537",),
)
class OneRowPerRequest(EagerPrefillBackend):
    """With a longest query of 1, row i is taken for request i, requests without queries included."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        if self._prefill_metadata.max_query_len == 1:
            total, requests = query_start_loc[-1], len(query_start_loc) - 1
            query_start_loc = [min(row, total) for row in range(requests + 1)]
        return super()._batch(q, k, v, query_start_loc, key_start_loc, causal)


@known_defect(
    "fa4-zero-len-k-hang-nan",
    killed_by="empty_rows",
    sources=(
        "Dao-AILab/flash-attention#2568",
        "Dao-AILab/flash-attention#2562",
    ),
)
class NanForWideHeads(EagerPrefillBackend):
    """A row without keys is 0 / 0 where V has 256 columns."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return (
            (output.masked_fill(lse.mT.unsqueeze(-1) == -torch.inf, torch.nan), lse)
            if output.shape[-1] == 256
            else (output, lse)
        )


@known_defect(
    "skip-softmax-zero-len-div",
    killed_by="empty_rows",
    sources=("flashinfer-ai/flashinfer#2446",),
)
class ThresholdOfEmptyRequest(EagerPrefillBackend):
    """A threshold divided by a length of 0 skips every tile of the whole batch."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        if _empty(query_start_loc, key_start_loc):
            output, lse = torch.zeros_like(output), torch.full_like(lse, -torch.inf)
        return output, lse
