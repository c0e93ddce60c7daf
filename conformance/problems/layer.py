"""From a layer case to its call: a batch of prefills and decodes over a paged cache, and what it must leave there."""

from functools import cached_property

import torch

from mla_conformance.backends.layer.mla_requests import LayerRequest
from mla_conformance.cases.hazards import Site
from mla_conformance.cases.layer import LayerCase, Order
from mla_conformance.problems.cache_bytes import ExpectedCache
from mla_conformance.problems.layer_call import LayerCall
from mla_conformance.problems.layer_weights import selections
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import Draw, edges, segments, start_loc
from mla_conformance.problems.paging import write_pages
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.chunking import plan_context_chunks
from mla_conformance.reference.projections import expand_key, up_project


def layer_problem(case: LayerCase, device: torch.device) -> Problem:
    """The problem of a layer case: one call.

    Raises:
        ProblemError: a regime or dtype that does not exist here.
        ValueError: the reference's chunk planner refuses the case.
    """
    return Problem(case, case.id, device, (LayerBatch(case, device).call(),))


class LayerBatch(Draw[LayerCase]):
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
            q=q[: self.query_start_loc[-1]],
            k=k.to(self.device),
            v=v.to(self.device),
            query_start_loc=self.query_start_loc,
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
        return [index not in self.case.decoding for index in range(len(self.case.q))]

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
        stored = decode_rows(self._entries(latents), case.cache, case.cache_scale, *case.latent_dims, self.dtype)
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
        return encode(*latents, self.case.cache, self.case.cache_scale)

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
