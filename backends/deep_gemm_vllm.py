"""DEEPGEMM_INDEXER[vllm]: DeepGEMM as the wheel of vLLM carries it, which calls torch by its stable interface alone.

Written for vLLM 0.33.0 with DeepGEMM 2.8.1, as ``vllm/utils/deep_gemm.py`` calls it.
"""

from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.deep_gemm import DeepGemmIndexerBackend
from mla_conformance.backends.dependencies import Library, extra
from mla_conformance.backends.indexer import bounds_of, check_index_call

_LIBRARY = Library("vllm.third_party.deep_gemm", "vllm", extra("vllm"), "it compiles at the first call and needs nvcc")
_PAGE = 64
_CLUSTERS = {1: 1, 2: 1, 4: 2}
"""Query tokens of a request that its kernels take together, and how many processors then share a piece of work."""
_ALONE = "a paged call takes 1, 2 or 4 query tokens of every request"


class DeepGemmIndexerVllm(DeepGemmIndexerBackend):
    """Queries come with their scales, of which those in e4m3 have none."""

    libraries: ClassVar[tuple[Library, ...]] = (_LIBRARY,)
    variant: ClassVar[str] = "vllm"
    declaration: ClassVar[Declaration] = Declaration(
        distributions=("vllm", "torch"),
        rounding=DeepGemmIndexerBackend.declaration.rounding,
        deviations=(
            Deviation(_ALONE, "others become requests of one each"),
            *DeepGemmIndexerBackend.declaration.deviations[1:],
        ),
    )

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
        ends = first + bounds_of(metadata)
        return _LIBRARY.load().fp8_fp4_mqa_logits(
            (q.contiguous(), None), (k, k_scale), weights, first, ends, metadata.max_seq_len
        )

    def _paged(self, q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        metadata, library = self._sparse_metadata, _LIBRARY.load()
        assert metadata.block_table is not None
        queries = set(metadata.query_lens_cpu.tolist())
        together = next(iter(queries)) if len(queries) == 1 and queries <= {*_CLUSTERS} else 1
        table = metadata.block_table if queries == {together} else metadata.block_table[metadata.req_id_per_token]
        lengths = bounds_of(metadata).view(-1, together)
        schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE, library.get_num_sms() // _CLUSTERS[together])
        query, pages = (q.unflatten(0, (-1, together)), None), cache.unsqueeze(2)
        return library.fp8_fp4_paged_mqa_logits(query, pages, weights, lengths, table, schedule, metadata.max_seq_len)
