"""Wrong LSEs beside right outputs: base, layout, scale, stale slots."""

import math
from itertools import pairwise

import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "lse-base2-merged-as-natural-prefix-chunk",
    killed_by="lse",
    sources=(
        "sgl-project/sglang#35045",
        "sgl-project/sglang#40903",
        "flashinfer-ai/flashinfer#4547",
    ),
)
class Base2ContextLse(EagerPrefillBackend):
    """The LSE of context chunks is in base 2."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        return output, lse / math.log(2)


@known_defect(
    "lse-base-switch-without-abi-change-cutedsl",
    killed_by="lse",
    sources=("sgl-project/sglang#34240",),
)
class Base2InLargeBatches(EagerPrefillBackend):
    """The LSE is in base 2 for more than eight requests, where another kernel serves the call."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output, lse / math.log(2) if len(query_start_loc) > 9 else lse


@known_defect(
    "hopper-fmha-softmax-stats-drop-qscaling",
    killed_by="lse",
    sources=("NVIDIA/TensorRT-LLM#19112",),
)
class LseOfDefaultScale(EagerPrefillBackend):
    """The LSE of context chunks is that of the scale d^-1/2; the output has the given scale."""

    def run_prefill_context_chunk(self, chunk_idx, q, k, v):
        output, _ = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        given, self.scale = self.scale, q.shape[-1] ** -0.5
        _, lse = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        self.scale = given
        return output, lse


@known_defect(
    "lse-layout-tokens-heads-vs-heads-tokens",
    killed_by="lse",
    sources=(
        "vllm-project/vllm#57012",
        "vllm-project/vllm-xpu-kernels#479",
        "flashinfer-ai/flashinfer#3058",
    ),
)
class TransposedLse(EagerPrefillBackend):
    """The LSE is laid out [tokens, heads]."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        return output, lse.mT.contiguous()


@known_defect(
    "rocm-varlen-lse-padded-layout",
    killed_by="lse",
    sources=("pytorch/pytorch#187872",),
)
class PaddedLse(EagerPrefillBackend):
    """The LSE comes padded to the longest request and is read as packed."""

    def _batch(self, q, k, v, query_start_loc, key_start_loc, causal):
        output, lse = super()._batch(q, k, v, query_start_loc, key_start_loc, causal)
        lengths = [b - a for a, b in pairwise(query_start_loc)]
        padded = lse.new_zeros(len(lengths), self.num_heads, max(lengths))
        for request, (start, length) in enumerate(zip(query_start_loc, lengths, strict=False)):
            padded[request, :, :length] = lse[:, start : start + length]
        return output, padded.reshape(self.num_heads, -1)[:, : lse.shape[1]]


@known_defect(
    "aiter-ps-prefill-final-lse-wrong",
    killed_by="lse",
    sources=("ROCm/aiter#3606",),
)
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


@known_defect(
    "fa-splitkv-early-exit-lse-slot",
    killed_by="empty_rows",
    sources=("Dao-AILab/flash-attention#2842",),
)
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
