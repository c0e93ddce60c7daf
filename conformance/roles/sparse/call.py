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


@dataclass(frozen=True, kw_only=True)
class SparseCall(AttentionCall):
    """``run_sparse_decode`` or ``run_sparse_prefill``; k and v are what the keys of both caches mean, in float64."""

    selected: torch.Tensor  # [T, K + K'] int64 rows of k and v, or -1: what the lists mean
    slots: torch.Tensor  # [S] int64, where the key of each token stands
    metadata: MLASparseMetadata
    case: SparseCase

    interface: ClassVar = MLASparseBackend
    means: ClassVar = {"q": "T", "k": "", "v": "", "selected": "T", "slots": ""}  # lists name keys by number: all stay
    called: ClassVar = {"q": "query", "kv": "kv_cache"}

    @property
    def entry(self) -> str:
        return "run_sparse_decode" if self.case.is_paged else "run_sparse_prefill"

    @property
    def length(self) -> torch.Tensor | None:
        """[T] int32, of the lists of the first cache; None where they are not handed over."""
        _, length, *_ = self.named.values()
        found: torch.Tensor | None = length
        return found

    @property
    def stored(self) -> torch.Tensor:
        """The cache [blocks, page, width], or gathered keys [S, 1, D]."""
        _, stored, *_ = self.given.values()
        return stored

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
        """Gathered keys are plain: a prefill takes no scale of codes."""
        given = {name: x for name, x in self.given.items() if self.case.is_paged or name != "k_scale"}
        return super(SparseCall, replace(self, given=given)).invoke(backend, out)

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
            sink=self.named["attn_sink"],
        )


def longest_lists(selected: torch.Tensor, query_start_loc: Sequence[int]) -> tuple[int, ...]:
    """Keys of the longest list [T, K] of each request; -1 names none."""
    counts = (selected >= 0).sum(dim=1).tolist()
    return tuple(max(counts[rows], default=0) for rows in segments(query_start_loc))
