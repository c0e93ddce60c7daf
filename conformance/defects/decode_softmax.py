"""Wrong arithmetic of one request's decode: base, scale, elements, tiles."""

import math

import torch

from mla_conformance.backends.eager_decode import EagerDecodeBackend
from mla_conformance.defects.known import known_defect


@known_defect(
    "lse-base2-dcp-combine-flashinfer-mla",
    killed_by="decode_lse",
    related=("decode",),
    sources=(
        "vllm-project/vllm#43919",
        "vllm-project/vllm#47079",
        "vllm-project/vllm#28840",
    ),
)
class Base2DecodeLse(EagerDecodeBackend):
    """The LSE of a decode is in base 2 and is handed on as a natural one."""

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / math.log(2)


@known_defect(
    "no-lse-when-dcp-needs-it",
    killed_by="decode_lse",
    related=("decode",),
    sources=("local-inference-lab/vllm#56",),
)
class NoLse(EagerDecodeBackend):
    """None stands where the LSE should be."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)[0], None


@known_defect(
    "mla-decode-scale-missing-log2e",
    killed_by="decode",
    sources=("flashinfer-ai/flashinfer#787",),
)
class ScaleOfAnotherBase(EagerDecodeBackend):
    """Powers of two are taken of scores that were not multiplied by log2(e), so the softmax is too flat."""

    def _scores(self, q, k):
        return super()._scores(q, k) * math.log(2)


@known_defect(
    "sm89-mla-correctness",
    killed_by="decode",
    sources=("flashinfer-ai/flashinfer#821",),
)
class HalfATile(EagerDecodeBackend):
    """Where the tile does not fit into shared memory, only its first half is attended to."""

    def _tiles(self, keys):
        for tile in super()._tiles(keys):
            yield slice(tile.start, tile.start + -(-(tile.stop - tile.start) // 2))


@known_defect(
    "xqa-mla-bf16-ten-bugs",
    killed_by="decode",
    sources=("flashinfer-ai/flashinfer#2689",),
)
class StridesOfBytes(EagerDecodeBackend):
    """In a 16-bit cache, the element strides of a kernel for codes lead to every other element."""

    def _dequantise(self, rows, k_scale):
        keys = super()._dequantise(rows, k_scale)
        if rows.dtype.itemsize != 2:
            return keys
        return keys.flatten()[torch.arange(keys.numel()) * 2 % keys.numel()].view(keys.shape)


@known_defect(
    "cudnn-decode-key-omits-dtype-hardcoded-bf16",
    killed_by="decode",
    sources=("flashinfer-ai/flashinfer#4270",),
)
class BfloatGraph(EagerDecodeBackend):
    """The graph is built for bf16, and the bits of an fp16 model are read as such."""

    def run_decode(self, ql_nope, q_pe, kv_cache, k_scale):
        if ql_nope.dtype is not torch.float16:
            return super().run_decode(ql_nope, q_pe, kv_cache, k_scale)
        cache = kv_cache.view(torch.bfloat16) if kv_cache.dtype is torch.float16 else kv_cache
        operands = (ql_nope.view(torch.bfloat16), q_pe.view(torch.bfloat16))
        output, lse = super().run_decode(*operands, cache, k_scale)
        return output.view(torch.float16), lse


@known_defect(
    "mla-multi-seq-decode-cross-contamination",
    killed_by="decode",
    sources=("Avarok-Cybersecurity/atlas#84",),
)
class QueryOfTheNeighbour(EagerDecodeBackend):
    """One scratch row serves all requests, so a request may find the query of the one before it."""

    def _attend(self, q, request, seq_len, kv_cache, k_scale):
        found = self.__dict__.get("scratch", q) if request else q
        self.scratch = q
        return super()._attend(found if found.shape == q.shape else q, request, seq_len, kv_cache, k_scale)
