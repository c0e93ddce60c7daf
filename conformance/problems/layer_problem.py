"""From a layer case to its call: a batch of prefills and decodes over a paged cache, and what it must leave there."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from mla_conformance.backends.layer.mla_requests import LayerRequest
from mla_conformance.cases.case import Order
from mla_conformance.cases.hazards import Site
from mla_conformance.problems.cache_bytes import CacheImage, ExpectedCache
from mla_conformance.problems.calls import AttentionCall, Question
from mla_conformance.problems.layer_weights import PackedLinear, as_linear, selections
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import Draw, edges, segments, start_loc
from mla_conformance.problems.paging import write_pages
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.chunking import plan_context_chunks
from mla_conformance.reference.projections import expand_key, up_project

if TYPE_CHECKING:
    from mla_conformance.problems.problem import Problem


@dataclass(frozen=True)
class LayerCall(AttentionCall):
    """``forward`` of a layer; q, k and v are what it means: [T, N, P + R], [S, N, P + R] and [S, N, V] in float64.

    Attributes:
        query: [T, N·(P + R)], as handed over.
        kv_c: [T, L].
        k_pe: [T, 1, R].
        weight: [L, N, P + V] float64 of ``kv_b_proj``.
        packed: whether ``kv_b_proj`` holds codes under another name.
        requests: the batch.
        padding: rows of padding behind it; -1 where no graph is used.
        padding_counts: whether the metadata counts these rows, as requests without tokens.
        image: the cache before the call, and what it must hold after it.
        chunks: context chunks that a prefill merges with its new tokens.
    """

    query: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    weight: torch.Tensor
    requests: tuple[LayerRequest, ...]
    padding: int
    padding_counts: bool
    image: CacheImage
    chunks: int
    packed: bool = False

    @property
    def name(self) -> str:
        """How messages call it."""
        return "layer"

    @property
    def merges(self) -> int:
        """Merges of stored results that a prefill with context takes."""
        return self.chunks

    def returns_lse(self, problem: "Problem") -> bool:
        """A layer has none."""
        return False

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands; the cache is written, so its bytes are compared with what they must be."""
        return {name: getattr(self, name) for name in ("query", "kv_c", "k_pe")}

    def prepare(self, backend: Any, problem: "Problem") -> None:
        """Weights and metadata."""
        dense = as_linear(self.weight, problem.dtype, problem.device)
        backend.load(PackedLinear(dense) if self.packed else dense)
        backend.prepare(self)

    def invoke(self, backend: Any, problem: "Problem", out: Guarded | None) -> Any:
        """``forward`` on the cache as it was before; its result by heads."""
        self.image.reset()
        result = backend.forward(self)
        if not isinstance(result, torch.Tensor) or result.shape[0] != self.query.shape[0]:
            return result
        return result[: self.q.shape[0]].unflatten(-1, (problem.case.heads, -1))

    def wrong_writes(self) -> str:
        """What the last call wrote into the cache that it should not have, or failed to write."""
        return self.image.difference()

    def question(self, problem: "Problem") -> Question:
        """Attention over keys and values as a prefill has them; a decode computes the same."""
        codes = problem.case.cache != "auto"
        return Question(self.q, self.k, self.v, problem.query_start_loc, self.key_start_loc, True, codes)


class LayerBatch(Draw):
    """The batch of a layer case."""

    @property
    def padding_counts(self) -> bool:
        """Whether rows of padding are requests; behind prefills that come last, no decode can follow."""
        return self.case.order == Order.PREFILLS_FIRST or self.case.decodes == len(self.case.q)

    @cached_property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request, rows of padding that count last."""
        return self.case.q + (1,) * (self.case.pad if self.padding_counts else 0)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each request after the call; none of a row of padding that counts."""
        totals = tuple(q + kv for q, kv in zip(self.case.q, self.case.kv, strict=True))
        return totals + (0,) * (len(self.query_lens) - len(totals))

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        """First new token of each request, and the end."""
        return start_loc(self.query_lens)

    def call(self) -> LayerCall:
        """The layer's only call."""
        case = self.case
        weight = selections(case, self.generator)
        latents = self._latents()
        k, v = self._keys(latents, weight)
        q = self._queries(k)
        kv_c, k_pe = (self._new_tokens(x) for x in latents)
        expected = self._expected(latents)
        return LayerCall(
            chunk_idx=None,
            q=q[: self.query_start_loc[-1]],
            k=k.to(self.device),
            v=v.to(self.device),
            key_start_loc=start_loc(self.totals),
            query=q.flatten(1).contiguous(),
            kv_c=kv_c,
            k_pe=k_pe.unsqueeze(1),
            weight=weight,
            requests=self._requests(expected.block_ids),
            padding=case.pad or -1,
            padding_counts=self.padding_counts,
            image=expected.image(),
            chunks=len(plan_context_chunks(self._contexts, workspace_tokens=case.workspace, page_size=case.page)),
        )

    @property
    def _prefills(self) -> list[bool]:
        """Whether each request of the case prefills."""
        requests, decodes = len(self.case.q), self.case.decodes
        front = requests - decodes if self.case.order == Order.PREFILLS_FIRST else decodes
        return [(index < front) == (self.case.order == Order.PREFILLS_FIRST) for index in range(requests)]

    @property
    def _contexts(self) -> list[int]:
        return [kv for kv, prefill in zip(self.case.kv, self._prefills, strict=True) if prefill]

    def _latents(self) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_c [S, L] and k_pe [S, R] of all tokens in the model's dtype, on the CPU."""
        case, tokens = self.case, sum(self.totals)
        kv_c = torch.randn(tokens, case.kv_lora_rank, generator=self.generator)
        k_pe = torch.randn(tokens, case.dimensions.qk_rope_head_dim, generator=self.generator)
        return kv_c.to(self.dtype), k_pe.to(self.dtype)

    def _keys(self, latents: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """k [S, N, P + R] and v [S, N, V] float64: what was stored, but the new tokens of a prefill as they came."""
        case = self.case
        scale, dims = case.kscale / 1e6, (case.kv_lora_rank, case.dimensions.qk_rope_head_dim)
        stored = decode_rows(self._entries(latents), case.cache, scale, *dims, self.dtype)
        as_new = self._rows_of_prefills()
        kv_c, k_pe = (
            torch.where(as_new.unsqueeze(1), new.double(), old) for new, old in zip(latents, stored, strict=True)
        )
        k_nope, v = up_project(kv_c, weight).tensor_split([case.dimensions.qk_nope_head_dim], dim=-1)
        return expand_key(k_nope, k_pe), v

    def _rows_of_prefills(self) -> torch.Tensor:
        """[S] bool: tokens that a prefill attends to without reading them from the cache."""
        flags = [
            [prefill and token >= kv for token in range(q + kv)]
            for q, kv, prefill in zip(self.case.q, self.case.kv, self._prefills, strict=True)
        ]
        return torch.tensor([flag for request in flags for flag in request], dtype=torch.bool)

    def _entries(self, latents: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return encode(*latents, self.case.cache, self.case.kscale / 1e6)

    def _queries(self, k: torch.Tensor) -> torch.Tensor:
        """[T, N, P + R] in the model's dtype; rows of padding are poison."""
        case = self.case
        q = torch.randn(sum(case.q), case.heads, case.dimensions.qk_head_dim, generator=self.generator)
        for rows, seen in zip(segments(start_loc(case.q)), segments(start_loc(self.totals)), strict=False):
            site = Site(q[rows], k[seen].float(), case.softmax_scale, edges(seen.stop - seen.start, case))
            q[rows] = self.regime.queries(site)
        return self._padded(q.to(self.dtype))

    def _new_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The rows [S, width] of the new tokens, and poison for the padding."""
        stops = start_loc(self.totals)[1 : len(self.case.q) + 1]
        parts = [x[stop - q : stop] for stop, q in zip(stops, self.case.q, strict=True)]
        return self._padded(torch.cat(parts))

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """With rows of another poison than the cache's, so that it shows where they were written."""
        padding = -poison((self.case.pad, *x.shape[1:]), self.dtype, torch.device("cpu"), self.case.poison)
        return torch.cat([x, padding]).to(self.device)

    def _expected(self, latents: tuple[torch.Tensor, torch.Tensor]) -> ExpectedCache:
        lengths = [*self.totals, *(0 for _ in range(len(self.case.q) + self.case.pad - len(self.totals)))]
        pages = write_pages(self.case, self._entries(latents), lengths, self.device)
        return ExpectedCache(self.case, pages, self.totals, latents)

    def _requests(self, block_ids: list[list[int]]) -> tuple[LayerRequest, ...]:
        batch = zip(self.case.q, self.case.kv, block_ids, self._prefills, strict=False)
        return tuple(LayerRequest(q, kv, ids, prefill) for q, kv, ids, prefill in batch)
