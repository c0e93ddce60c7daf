"""A call of an indexer: the scores of cached tokens, or the best of them."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.cases.case import Call
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.roles.indexer.case import IndexerCase


@dataclass(frozen=True, kw_only=True)
class IndexerCall(KernelCall):
    """``run_index_logits`` or ``run_index_topk``; q is what is handed over, k what the keys mean, in float64."""

    query: torch.Tensor  # [T, H, D], as handed over
    weights: torch.Tensor  # [T, H] float32
    stored: torch.Tensor  # the keys as handed over, [blocks, page, width] or gathered [S, D]
    k_scale: torch.Tensor | None  # [S] float32, of gathered codes
    slots: torch.Tensor  # [S] int64 on the CPU, where the key of each token stands
    metadata: MLASparseMetadata
    case: IndexerCase

    means: ClassVar = ("k", "slots")
    reads: ClassVar = ("query", "weights", "stored", "k_scale")
    queries: ClassVar = ("query", "weights")
    per_row: ClassVar = ("q", *queries)
    per_key: ClassVar = means

    @property
    def name(self) -> str:
        return "index top-k" if self.selects else "index logits"

    @property
    def selects(self) -> bool:
        """Whether the best are asked for, not the scores."""
        return self.case.call == Call.INDEX_TOPK

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.topk if self.selects else self.metadata.max_seq_len

    @property
    def meant(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.weights

    def overwritten(self, other: Self) -> Self:
        return replace(super().overwritten(other), q=other.q)

    def invoke(self, backend: MLAIndexerBackend, out: Guarded | None) -> Any:
        scale = {} if self.k_scale is None else {"k_scale": self.k_scale}
        if self.selects:
            return backend.run_index_topk(self.query, self.weights, self.stored, self.case.topk, **scale)
        return backend.run_index_logits(self.query, self.weights, self.stored, **scale)
