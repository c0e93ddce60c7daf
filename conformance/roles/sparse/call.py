"""A call of a sparse backend: a decode on one rank, or a prefill over gathered keys."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.problems.cached_batch import regrouped_metadata
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded
from mla_conformance.problems.operands import rows_of, segments, start_loc
from mla_conformance.roles.sparse.case import SparseCase

_OPTIONAL = ("topk_length", "attn_sink", "extra_kv_cache", "extra_topk_indices", "extra_topk_length")


@dataclass(frozen=True, kw_only=True)
class SparseCall(AttentionCall):
    """``run_sparse_decode`` or ``run_sparse_prefill``; k and v are what the keys of both caches mean, in float64.

    Attributes:
        query: [T, N, D], as handed over.
        kv_cache: [blocks, page, width], or gathered keys [S, 1, D].
        k_scale: float32 scalar.
        topk_indices: [T, K] int32, as handed over; the others likewise, None where there are none.
        topk_length: [T] int32.
        attn_sink: [N] float32.
        extra_kv_cache: [blocks, page, width].
        extra_topk_indices: [T, K'] int32.
        extra_topk_length: [T] int32.
        selected: [T, K + K'] int64 rows of k and v, or -1: what the lists mean.
        slots: [S] int64, where the key of each token stands in ``kv_cache``.
        metadata: of the batch on this rank.
        case: what it was made from.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    k_scale: torch.Tensor
    topk_indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    extra_kv_cache: torch.Tensor | None
    extra_topk_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    selected: torch.Tensor
    slots: torch.Tensor
    metadata: MLASparseMetadata
    case: SparseCase

    means: ClassVar = ("q", "k", "v", "selected", "slots")

    @property
    def name(self) -> str:
        """How messages call it."""
        if self.metadata.dcp_world_size > 1:
            return f"rank {self.metadata.dcp_rank}"
        return "sparse decode" if self.case.is_paged else "sparse prefill"

    @property
    def returns_lse(self) -> bool:
        """As the case says."""
        return self.case.lse

    @property
    def key_lens(self) -> tuple[int, ...]:
        """The longest list of each request."""
        counts = (self.selected >= 0).sum(dim=1).tolist()
        return tuple(max(counts[rows], default=0) for rows in segments(self.query_start_loc))

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands, and every tensor of the metadata."""
        named = {name: getattr(self, name) for name in ("query", "kv_cache", "k_scale", "topk_indices", *_OPTIONAL)}
        named |= {field.name: getattr(self.metadata, field.name) for field in fields(self.metadata)}
        return {f"{name} of {self.name}": x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def query_operands(self) -> tuple[torch.Tensor, ...]:
        """The query."""
        return (self.query,)

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Other rows of the queries and lists; the cache stays as it is."""
        rows = rows_of(self.query_start_loc, requests).to(self.q.device)
        per_row = ("q", "query", "topk_indices", "topk_length", "extra_topk_indices", "extra_topk_length", "selected")
        picked = {name: getattr(self, name)[rows] for name in per_row if getattr(self, name) is not None}
        metadata = regrouped_metadata(self.metadata, requests)
        return replace(self, **picked, query_start_loc=start_loc(metadata.query_lens_cpu.tolist()), metadata=metadata)

    def overwritten(self, other: Self) -> Self:
        """What the operands mean changes with them."""
        return replace(super().overwritten(other), q=other.q, k=other.k, v=other.v, selected=other.selected)

    def prepare(self, backend: MLASparseBackend) -> None:
        """Before every call: each rank has metadata of its own."""
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: MLASparseBackend, out: Guarded | None) -> Any:
        """The call that the case names, with what there is of the optional operands."""
        given = {name: getattr(self, name) for name in _OPTIONAL if getattr(self, name) is not None}
        lists = {"topk_indices": self.topk_indices, "return_softmax_lse": self.case.lse, **given}
        if self.case.is_paged:
            return backend.run_sparse_decode(self.query, self.kv_cache, self.k_scale, **lists)
        return backend.run_sparse_prefill(self.query, self.kv_cache, **lists)

    def operands(self) -> AttentionOperands:
        """The attention that the call computes."""
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
