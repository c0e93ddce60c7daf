"""From an indexer's case to its call: keys in a paged index cache or gathered, queries, and the weights of heads."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from mla_conformance.backends.indexer import MLAIndexerBackend
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.cases.case import Call
from mla_conformance.problems.cached_batch import CachedBatch, PageForm, gather_entries, sparse_metadata, write_pages
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.operands import lay_out, start_loc
from mla_conformance.reference.quantization import E4M3_MAX, quantize_e4m3
from mla_conformance.roles.indexer.case import IndexerCase

_MEAN_WEIGHT = 0.5
"""Weights have either sign, most of them that of a key that all heads agree on."""


@dataclass(frozen=True, kw_only=True)
class IndexerCall(KernelCall):
    """``run_index_logits`` or ``run_index_topk``; q is what is handed over, k what the keys mean, in float64."""

    slots: torch.Tensor  # [S] int64 on the CPU, where the key of each token stands
    metadata: MLASparseMetadata
    case: IndexerCase

    meant: ClassVar = ("q", "k", "weights")
    interface: ClassVar = MLAIndexerBackend
    means: ClassVar = {"q": "T", "k": "S", "slots": "S"}
    called: ClassVar = {"q": "query", "k": "stored"}

    @property
    def name(self) -> str:
        return "index top-k" if self.selects else "index logits"

    @property
    def entry(self) -> str:
        return "run_index_topk" if self.selects else "run_index_logits"

    @property
    def selects(self) -> bool:
        return self.case.call == Call.INDEX_TOPK

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.q.shape[0], self.case.topk if self.selects else self.metadata.max_seq_len


class IndexerBatch(CachedBatch[IndexerCase]):
    """The batch of an indexer's case."""

    @cached_property
    def drawn(self) -> torch.Tensor:
        """[rows, H, D] in the model's dtype, on the CPU, without rows of padding."""
        case = self.case
        q = torch.randn(sum(case.q), case.heads, case.head_dim, generator=self.generator)
        return self.queries_of(q, lambda: self.sites(q)).to(self.dtype)

    @cached_property
    def weights(self) -> torch.Tensor:
        """[T, H] float32 on the device: those of the model times its scales, and times those of queries in codes."""
        case, shape = self.case, self.drawn.shape[:2]
        drawn = _MEAN_WEIGHT + torch.randn(shape, generator=self.generator)
        scaled = drawn * case.heads**-0.5 * case.softmax_scale * self._query_scales
        return self.padded(scaled.float())

    @property
    def _query_scales(self) -> torch.Tensor:
        """[rows, H], the next power of two of the least scale that leaves no head out of the codes' range."""
        if not self.case.holds_codes:
            return torch.ones(self.drawn.shape[:2])
        return torch.exp2((self.drawn.double().abs().amax(dim=-1) / E4M3_MAX).clamp(min=1e-10).log2().ceil())

    @cached_property
    def queries(self) -> torch.Tensor:
        """[T, H, D] in codes or in the model's dtype, on the device; rows of padding are poison."""
        if not self.case.holds_codes:
            return self.padded(self.drawn)
        return self.padded(quantize_e4m3(self.drawn.double() / self._query_scales.unsqueeze(-1), 1.0))

    def calls(self) -> tuple[IndexerCall]:
        _ = self.entries, self.drawn, self.weights  # drawn in this order, whatever asks first
        if self.case.is_paged:
            pages = write_pages(self, PageForm(self.case.cache, self.case.page), self.entries, self.totals)
            k, k_scale = pages.cache, None
        else:
            pages = gather_entries(self.case, self.entries, self.totals, self.device)
            k, k_scale = self._gathered(pages.cache[:, 0])
        only = IndexerCall(
            q=self.queries,
            k=self.keys,
            query_start_loc=self.query_start_loc,
            key_start_loc=start_loc(self.totals),
            given={
                "q": lay_out("q", self.queries, self.queries, self.case),
                "weights": self.weights,
                "k": k,
                **({"topk_tokens": self.case.topk} if self.case.call == Call.INDEX_TOPK else {}),
            },
            named={"k_scale": k_scale},
            slots=pages.slots,
            metadata=sparse_metadata(self, pages, self.totals, paged=self.case.is_paged, space=self.case.space),
            case=self.case,
        )
        return (only,)

    def _gathered(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys [S, D] and the scales [S] of codes, of gathered entries [S, width]."""
        if not self.case.holds_codes:
            return entries, None
        codes, scales = entries.split([self.case.head_dim, entries.shape[1] - self.case.head_dim], dim=1)
        return codes.contiguous().view(torch.float8_e4m3fn), scales.contiguous().view(torch.float32)[:, 0]
