"""A call of a sparse backend: a decode on one rank, or a prefill over gathered keys."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import segments
from mla_conformance.roles.sparse.case import SparseCase

_OPTIONAL = ("topk_length", "attn_sink", "extra_kv_cache", "extra_topk_indices", "extra_topk_length")


@dataclass(frozen=True, kw_only=True)
class SparseCall(AttentionCall):
    """``run_sparse_decode`` or ``run_sparse_prefill``; k and v are what the keys of both caches mean, in float64."""

    query: torch.Tensor  # [T, N, D], as handed over
    kv_cache: torch.Tensor  # [blocks, page, width], or gathered keys [S, 1, D]
    k_scale: torch.Tensor  # float32 scalar
    topk_indices: torch.Tensor  # [T, K] int32, as handed over; the others likewise, None where there are none
    topk_length: torch.Tensor | None  # [T] int32
    attn_sink: torch.Tensor | None  # [N] float32
    extra_kv_cache: torch.Tensor | None  # [blocks, page, width]
    extra_topk_indices: torch.Tensor | None  # [T, K'] int32
    extra_topk_length: torch.Tensor | None  # [T] int32
    selected: torch.Tensor  # [T, K + K'] int64 rows of k and v, or -1: what the lists mean
    slots: torch.Tensor  # [S] int64, where the key of each token stands in ``kv_cache``
    metadata: MLASparseMetadata
    case: SparseCase

    means: ClassVar = ("q", "k", "v", "selected", "slots")
    reads: ClassVar = ("query", "kv_cache", "k_scale", "topk_indices", *_OPTIONAL)
    queries: ClassVar = ("query",)
    per_row: ClassVar = (
        *("q", "query", "topk_indices", "topk_length", "extra_topk_indices", "extra_topk_length", "selected"),
    )

    @property
    def name(self) -> str:
        if self.metadata.dcp_world_size > 1:
            return f"rank {self.metadata.dcp_rank}"
        return "sparse decode" if self.case.is_paged else "sparse prefill"

    @property
    def returns_lse(self) -> bool:
        return self.case.lse

    @property
    def key_lens(self) -> tuple[int, ...]:
        return longest_lists(self.selected, self.query_start_loc)

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """The keys stay all, since lists name them by number."""
        return replace(super().regrouped(case, requests, queries), key_start_loc=self.key_start_loc)

    def invoke(self, backend: MLASparseBackend, out: Guarded | None) -> Any:
        given = {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) is not None}
        lists = {"topk_indices": self.topk_indices, "return_softmax_lse": self.case.lse, **given}
        if self.case.is_paged:
            return backend.run_sparse_decode(self.query, self.kv_cache, self.k_scale, **lists)
        return backend.run_sparse_prefill(self.query, self.kv_cache, **lists)

    def operands(self) -> AttentionOperands:
        return AttentionOperands(
            self.q,
            self.k,
            self.v,
            self.query_start_loc,
            self.key_start_loc,
            causal=False,
            dequantised=self.case.holds_codes,
            selected=self.selected,
            sink=self.attn_sink,
        )


def longest_lists(selected: torch.Tensor, query_start_loc: Sequence[int]) -> tuple[int, ...]:
    """Keys of the longest list [T, K] of each request; -1 names none."""
    counts = (selected >= 0).sum(dim=1).tolist()
    return tuple(max(counts[rows], default=0) for rows in segments(query_start_loc))
