"""DEEPGEMM_INDEXER: DeepGEMM's scores of an indexer in e4m3 on Hopper, paged and gathered, as vLLM and SGLang call it.

It compiles its kernels when they are first called, with the nvcc of CUDA_HOME. Variant ``vllm`` is DeepGEMM as the
wheel of vLLM carries it, which calls torch by its stable interface alone: written for vLLM 0.33.0 with DeepGEMM 2.8.1,
as ``vllm/utils/deep_gemm.py`` calls it.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.declaration import Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.indexer import MLAIndexerBackend, bounds_of, check_index_call
from mla_conformance.backends.packaged import NEW_SCHEDULE, LibraryKernel, declared
from mla_conformance.backends.platform import HOPPER

_PAGE, _NOTE = 64, "it compiles at the first call and needs nvcc"
_OTHERS = (
    ("wants the number of tokens that each row sees", "derived from the lengths, on the device"),
    NEW_SCHEDULE,
    ("wants queries without gaps", "copies them"),
)


class DeepGemmIndexerBackend(LibraryKernel, MLAIndexerBackend):
    """Scores alone: it selects nothing; Blackwell's kernels want other scales and weights.

    Attributes:
        clusters: query tokens of a request that a paged call takes together, and how many processors then share a
            piece of work.
        with_scales: whether queries come with their scales, of which those in e4m3 have none.
    """

    name = "DEEPGEMM_INDEXER"
    libraries = (Library("deep_gemm", "sgl-deep-gemm", extra("deepgemm"), _NOTE),)
    devices = HOPPER
    clusters: ClassVar[Mapping[int, int]] = {1: 1, 2: 1}
    with_scales: ClassVar[bool] = False
    supported_block_sizes = [_PAGE]
    supported_dtypes = [torch.bfloat16]
    supported_calls = ["logits"]
    supported_heads = [32, 64]
    supported_head_dims = [128]
    declaration = declared(
        "sgl-deep-gemm torch",
        ("a paged call takes 1 or 2 query tokens of every request", "others become requests of one each"),
        *_OTHERS,
        rounding=Rounding(accumulation=Precision.FP22),
    )

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        metadata = self._sparse_metadata
        check_index_call(self, metadata, (q, weights, k, k_scale), "logits")
        deep_gemm = self.library
        request, longest, q = metadata.req_id_per_token, metadata.max_seq_len, q.contiguous()
        if k_scale is not None:
            assert metadata.workspace_starts is not None
            first = metadata.workspace_starts[request.long()]
            ends, query = first + bounds_of(metadata), (q, None) if self.with_scales else q
            return deep_gemm.fp8_fp4_mqa_logits(query, (k, k_scale), weights, first, ends, longest)
        assert metadata.block_table is not None
        queries = set(metadata.query_lens_cpu.tolist())
        together = next(iter(queries)) if len(queries) == 1 and queries <= {*self.clusters} else 1
        table = metadata.block_table if queries == {together} else metadata.block_table[request]
        lengths, pages = bounds_of(metadata).view(-1, together), k.unsqueeze(2)
        processors = deep_gemm.get_num_sms() // self.clusters[together]
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, _PAGE, processors)
        q = q.unflatten(0, (-1, together))
        query = (q, None) if self.with_scales else q
        return deep_gemm.fp8_fp4_paged_mqa_logits(query, pages, weights, lengths, table, schedule, longest)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "topk", topk_tokens)
        raise AssertionError("not declared, so refused before")


class DeepGemmIndexerVllm(DeepGemmIndexerBackend, variant="vllm"):
    """Queries with their scales."""

    libraries = (Library("vllm.third_party.deep_gemm", "vllm", extra("vllm"), _NOTE),)
    clusters = {1: 1, 2: 1, 4: 2}
    with_scales = True
    declaration = declared(
        "vllm torch",
        ("a paged call takes 1, 2 or 4 query tokens of every request", "others become requests of one each"),
        *_OTHERS,
        rounding=DeepGemmIndexerBackend.declaration.rounding,
    )
