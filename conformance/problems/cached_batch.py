"""The batch of a case over a paged cache: its lengths, the entries of its tokens, and what of them a rank holds."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch

from mla_conformance.backends.roles import IndexSpace
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.operands import Draw, edges, segments, start_loc
from mla_conformance.problems.paging import Pages
from mla_conformance.problems.regimes import Site
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.kv_cache import local_positions

AnyCached = TypeVar("AnyCached", bound=CachedCase)


class CachedBatch(Draw[AnyCached]):
    """The batch before its tokens are dealt out to ranks."""

    @cached_property
    def query_lens(self) -> tuple[int, ...]:
        """Query tokens of each request, rows of padding last."""
        return self.case.q + (1,) * self.case.pad

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return start_loc(self.query_lens)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Cached tokens of each request on all ranks, its new ones included; none of a row of padding."""
        return tuple(q + kv for q, kv in zip(self.case.q, self.case.kv, strict=True)) + (0,) * self.case.pad

    @cached_property
    def k_scale(self) -> torch.Tensor:
        return torch.tensor(self.case.cache_scale, dtype=torch.float32, device=self.device)

    @cached_property
    def entries(self) -> torch.Tensor:
        """[S, width] entries of all tokens, on the CPU."""
        return self.draw_entries(self.totals, self.case.cache)

    @cached_property
    def keys(self) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what the entries mean."""
        return self.meaning(self.entries, self.case.cache)

    def draw_entries(self, lengths: Sequence[int], layout: str) -> torch.Tensor:
        """[tokens, width] entries of a layout, so many of each request as its regime makes keys, on the CPU."""
        case, rank, starts = self.case, self.case.kv_lora_rank, start_loc(lengths)
        width = rank + case.dimensions.qk_rope_head_dim
        keys = self.keys_of(torch.randn(starts[-1], 1, width, generator=self.generator), starts)[:, 0]
        kv_c = self.values_of(keys[:, :rank], starts)
        parts = (part.to(self.dtype).to(self.device) for part in (kv_c, keys[:, rank:]))
        # Every step of it is exact or correctly rounded, so that a GPU writes the same bits, sooner.
        return encode(*parts, layout, float(self.k_scale), case.scales).cpu()  # type: ignore[arg-type, call-arg]

    def meaning(self, entries: torch.Tensor, layout: str) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what entries mean."""
        there = entries.to(self.device)
        parts = decode_rows(there, layout, float(self.k_scale), *self.case.latent_dims, self.dtype)
        return torch.cat(parts, dim=-1).unsqueeze(1)

    def sites(self, q: torch.Tensor) -> Iterator[tuple[slice, Site]]:
        """Each request's rows of the queries q [T, N, D], and its keys."""
        case, keys = self.case, self.keys.float().cpu()
        for rows, seen in zip(segments(start_loc(case.q)), segments(start_loc(self.totals)), strict=False):
            k = keys[seen].expand(-1, case.heads, -1)
            yield rows, Site(q[rows], k, case.softmax_scale, edges(k.shape[0], case), causal=True)

    def owned(self, rank: int) -> tuple[list[int], torch.Tensor]:
        """How many tokens of each request a rank holds, and the numbers of these tokens among those of the batch."""
        held = self.held(rank)
        return list(map(len, held)), torch.cat(
            [first + own for first, own in zip(start_loc(self.totals), held, strict=False)]
        )

    def held(self, rank: int) -> list[torch.Tensor]:
        """Positions of each request's tokens that a rank holds."""
        if self.case.ranks == 1:
            return list(map(torch.arange, self.totals))
        world = {"rank": rank, "world_size": self.case.ranks, "interleave": self.case.interleave}
        return [torch.tensor(local_positions(total, **world), dtype=torch.int64) for total in self.totals]


def int32(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def sparse_metadata(
    batch: CachedBatch[Any], pages: Pages, lengths: Sequence[int], *, paged: bool, space: str, rank: int = 0
) -> MLASparseMetadata:
    """Metadata on one rank; its maxima are inflated as the case says.

    Args:
        batch: gives the case and the query tokens.
        pages: where the keys are.
        lengths: keys of each request on this rank.
        paged: whether they lie in a cache; otherwise ``pages`` tells where those of each request begin.
        space: what lists count.
        rank: which rank.
    """
    case, device, cpu = batch.case, batch.device, torch.device("cpu")
    request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(batch.query_lens))
    return MLASparseMetadata(
        query_start_loc=int32(batch.query_start_loc, device),
        req_id_per_token=request.int().to(device),
        seq_lens=int32(lengths, device),
        block_table=pages.block_table if paged else None,
        workspace_starts=None if paged else pages.block_table,
        index_space=IndexSpace(space),
        max_query_len=max(batch.query_lens) * case.inflate,
        max_seq_len=max(1, *lengths) * case.inflate,
        query_lens_cpu=int32(batch.query_lens, cpu),
        seq_lens_cpu=int32(lengths, cpu),
        dcp_world_size=case.ranks,
        dcp_rank=rank,
        cp_kv_cache_interleave_size=case.interleave,
    )
