"""A call of an indexer: the scores of cached tokens, or the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.cases.case import Call
from mla_conformance.problems.cached_batch import regrouped_metadata
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import rows_of, start_loc
from mla_conformance.roles.indexer.case import IndexerCase


@dataclass(frozen=True, kw_only=True)
class IndexerCall(KernelCall):
    """``run_index_logits`` or ``run_index_topk``; q is what is handed over, k what the keys mean, in float64.

    Attributes:
        query: [T, H, D], as handed over.
        weights: [T, H] float32.
        stored: the keys as handed over, [blocks, page, width] or gathered [S, D].
        k_scale: [S] float32, of gathered codes.
        slots: [S] int64 on the CPU, where the key of each token stands.
        metadata: of the batch.
        case: what it was made from.
    """

    query: torch.Tensor
    weights: torch.Tensor
    stored: torch.Tensor
    k_scale: torch.Tensor | None
    slots: torch.Tensor
    metadata: MLASparseMetadata
    case: IndexerCase

    means: ClassVar = ("k", "slots")

    @property
    def name(self) -> str:
        """How messages call it."""
        return "index top-k" if self.selects else "index logits"

    @property
    def selects(self) -> bool:
        """Whether the best are asked for, not the scores."""
        return self.case.call == Call.INDEX_TOPK

    @property
    def result_shape(self) -> tuple[int, ...]:
        """A row for each query token."""
        return self.q.shape[0], self.case.topk if self.selects else self.metadata.max_seq_len

    @property
    def meant(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and weights."""
        return self.q, self.k, self.weights

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands, and every tensor of the metadata."""
        named = {name: getattr(self, name) for name in ("query", "weights", "stored", "k_scale")}
        named |= {field.name: getattr(self.metadata, field.name) for field in fields(self.metadata)}
        return {f"{name} of {self.name}": x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def query_operands(self) -> tuple[torch.Tensor, ...]:
        """Queries and weights."""
        return self.query, self.weights

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other rows, and the keys of their requests; what is stored stays as it is."""
        rows = rows_of(self.query_start_loc, requests).to(self.q.device)
        keys = rows_of(self.key_start_loc, requests)
        metadata = regrouped_metadata(self.metadata, requests)
        return replace(
            self,
            q=self.q[rows],
            query=self.query[rows],
            weights=self.weights[rows],
            k=self.k[keys.to(self.k.device)],
            slots=self.slots[keys],
            query_start_loc=start_loc(metadata.query_lens_cpu.tolist()),
            key_start_loc=start_loc(metadata.seq_lens_cpu.tolist()),
            metadata=metadata,
        )

    def overwritten(self, other: Self) -> Self:
        """What the operands mean changes with them."""
        return replace(super().overwritten(other), q=other.q, k=other.k, slots=other.slots)

    def prepare(self, backend: MLAIndexerBackend) -> None:
        """Before every call."""
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: MLAIndexerBackend, out: Guarded | None) -> Any:
        """The call that the case names."""
        scale = {} if self.k_scale is None else {"k_scale": self.k_scale}
        if self.selects:
            return backend.run_index_topk(self.query, self.weights, self.stored, self.case.topk, **scale)
        return backend.run_index_logits(self.query, self.weights, self.stored, **scale)
