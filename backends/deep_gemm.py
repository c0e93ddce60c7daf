"""DEEPGEMM_INDEXER: DeepGEMM's scores of an indexer in e4m3 on Hopper, paged and gathered, as vLLM and SGLang call it.

It compiles its kernels when they are first called, with the nvcc of CUDA_HOME.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.indexer import MLAIndexerBackend, bounds_of, check_index_call
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import HOPPER, Devices

_DEEP_GEMM = Library("deep_gemm", "sgl-deep-gemm", extra("deepgemm"), "it compiles at the first call and needs nvcc")
_PAGE = 64


class DeepGemmIndexerBackend(LibraryKernel, MLAIndexerBackend):
    """Scores alone: it selects nothing; Blackwell's kernels want other scales and weights.

    Attributes:
        clusters: query tokens of a request that a paged call takes together, and how many processors then share a
            piece of work.
    """

    clusters: ClassVar[Mapping[int, int]] = MappingProxyType({1: 1, 2: 1})
    name: ClassVar[str] = "DEEPGEMM_INDEXER"
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [_PAGE]
    libraries: ClassVar[tuple[Library, ...]] = (_DEEP_GEMM,)
    devices: ClassVar[Devices] = HOPPER
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_calls: ClassVar[list[str]] = ["logits"]
    supported_heads: ClassVar[list[int]] = [32, 64]
    supported_head_dims: ClassVar[list[int]] = [128]
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("sgl-deep-gemm", "torch"),
        rounding=Rounding(accumulation=Precision.FP22),
        deviations=(
            Deviation("a paged call takes 1 or 2 query tokens of every request", "others become requests of one each"),
            Deviation("wants the number of tokens that each row sees", "derived from the lengths, on the device"),
            Deviation("a schedule holds for one batch of lengths", "a new one at each call, made on the device"),
            Deviation("wants queries without gaps", "copies them"),
        ),
    )

    def run_index_logits(self, q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor | None = None) -> Tensor:
        """See :class:`MLAIndexerBackend`."""
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "logits")
        if k_scale is None:
            return self._paged(q.contiguous(), weights, k)
        metadata, request = self._sparse_metadata, self._sparse_metadata.req_id_per_token.long()
        assert metadata.workspace_starts is not None
        first = metadata.workspace_starts[request]
        keys, ends = (k, k_scale), first + bounds_of(metadata)
        query = self._query(q.contiguous())
        return self.library.fp8_fp4_mqa_logits(query, keys, weights, first, ends, metadata.max_seq_len)

    def run_index_topk(
        self, q: Tensor, weights: Tensor, k: Tensor, topk_tokens: int, k_scale: Tensor | None = None
    ) -> Tensor:
        """Refused."""
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "topk", topk_tokens)
        raise AssertionError("not declared, so refused before")

    def _query(self, q: Tensor) -> Any:
        """Queries as the library takes them."""
        return q

    def _paged(self, q: Tensor, weights: Tensor, cache: Tensor) -> Tensor:
        metadata, library = self._sparse_metadata, self.library
        assert metadata.block_table is not None
        queries = set(metadata.query_lens_cpu.tolist())
        together = next(iter(queries)) if len(queries) == 1 and queries <= {*self.clusters} else 1
        table = metadata.block_table if queries == {together} else metadata.block_table[metadata.req_id_per_token]
        lengths = bounds_of(metadata).view(-1, together)
        processors = library.get_num_sms() // self.clusters[together]
        schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, processors)
        query, pages = self._query(q.unflatten(0, (-1, together))), cache.unsqueeze(2)
        return library.fp8_fp4_paged_mqa_logits(query, pages, weights, lengths, table, schedule, metadata.max_seq_len)
