"""DEEPGEMM_INDEXER: DeepGEMM's scores of an indexer in e4m3 on Hopper, paged and gathered, as vLLM and SGLang call it.

It compiles its kernels when they are first called, with the nvcc of CUDA_HOME.
"""

from typing import ClassVar

import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.indexer import MLAIndexerBackend, bounds_of, check_index_call
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import DeviceCapability

_DEEP_GEMM = Library("deep_gemm", "sgl-deep-gemm", extra("deepgemm"), "it compiles at the first call and needs nvcc")
_PAGE = 64
_QUERIES = (1, 2)
"""Query tokens of a request that its kernels take together."""


class DeepGemmIndexerBackend(LibraryKernel, MLAIndexerBackend):
    """Scores alone: it selects nothing."""

    libraries: ClassVar[tuple[Library, ...]] = (_DEEP_GEMM,)
    needed_capability: ClassVar[str] = "9.0"
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

    @staticmethod
    def get_name() -> str:
        """Name of the backend."""
        return "DEEPGEMM_INDEXER"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages of 64 tokens."""
        return [_PAGE]

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Hopper; Blackwell's kernels want other scales and weights."""
        return device_capability is not None and device_capability.major == 9

    def run_index_logits(
        self, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, k_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :class:`MLAIndexerBackend`."""
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "logits")
        if k_scale is None:
            return self._paged(q.contiguous(), weights, k)
        metadata, request = self._sparse_metadata, self._sparse_metadata.req_id_per_token.long()
        assert metadata.workspace_starts is not None
        first = metadata.workspace_starts[request]
        keys, ends = (k, k_scale), first + bounds_of(metadata)
        return _DEEP_GEMM.load().fp8_fp4_mqa_logits(q.contiguous(), keys, weights, first, ends, metadata.max_seq_len)

    def run_index_topk(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        k: torch.Tensor,
        topk_tokens: int,
        k_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Refused."""
        check_index_call(self, self._sparse_metadata, (q, weights, k, k_scale), "topk", topk_tokens)
        raise AssertionError("not declared, so refused before")

    def _paged(self, q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        metadata, library = self._sparse_metadata, _DEEP_GEMM.load()
        assert metadata.block_table is not None
        queries = set(metadata.query_lens_cpu.tolist())
        together = next(iter(queries)) if len(queries) == 1 and queries <= {*_QUERIES} else 1
        table = metadata.block_table if together == max(queries) else metadata.block_table[metadata.req_id_per_token]
        lengths = bounds_of(metadata).view(-1, together)
        schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, library.get_num_sms())
        query, pages = q.unflatten(0, (-1, together)), cache.unsqueeze(2)
        return library.fp8_fp4_paged_mqa_logits(query, pages, weights, lengths, table, schedule, metadata.max_seq_len)
