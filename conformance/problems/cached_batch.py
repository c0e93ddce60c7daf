"""The batch of a case over a paged cache: its lengths, the entries of its tokens, and what of them a rank holds."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from mla_conformance.backends import roles, sparse
from mla_conformance.backends.kernel import int32 as int32
from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems import calls, memory
from mla_conformance.problems.operands import KEYS, VALUES, Draw, segments, start_loc
from mla_conformance.reference import cache_layout, entry_formats

_UNUSED_COLUMNS = 2
_HUGE = 2**31 - 1
AnyCached = TypeVar("AnyCached", bound=CachedCase)


@dataclass(frozen=True)
class Pages:
    cache: torch.Tensor  # [blocks, page, width]; a slice of a buffer of several layers if the case says so
    # [B, max blocks] int32, on the cache's device; of gathered entries [B], where each request begins
    block_table: torch.Tensor
    slots: torch.Tensor  # [S] int64, on the CPU; where each token's entry stands, block · page + offset


class CachedBatch(Draw[AnyCached]):  # the batch before its tokens are dealt out to ranks
    queries: Any  # [T, N, L + R] in the model's dtype, on the device; rows of padding are poison

    def __init__(self, case: AnyCached, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        padding = case.pad * getattr(case, "padding_counts", True)  # a layer may not be told of these rows
        self.query_lens = case.q + (1,) * padding
        self.query_start_loc = start_loc(self.query_lens)
        # Cached tokens of each request on all ranks, its new ones included; none of a row of padding.
        self.totals = tuple(q + kv for q, kv in zip(case.q, case.kv, strict=True)) + (0,) * padding
        self.k_scale = torch.tensor(case.cache_scale, dtype=torch.float32, device=device)

    @cached_property
    def entries(self) -> torch.Tensor:
        return self.draw_entries(self.totals, self.case.cache)

    @cached_property
    def keys(self) -> torch.Tensor:
        return self.meaning(self.entries, self.case.cache)

    def draw_entries(self, lengths: Sequence[int], layout: str) -> torch.Tensor:
        """[tokens, width] entries of a layout, so many of each request, on the CPU."""
        case, rank, starts = self.case, self.case.kv_lora_rank, start_loc(lengths)
        drawn = torch.randn(starts[-1], 1, rank + case.rope_dim, generator=self.generator)
        keys = self.by_request(KEYS, drawn, starts)[:, 0]
        kv_c = self.by_request(VALUES, keys[:, :rank], starts)
        kv_c, k_pe = (part.to(self.dtype).to(self.device) for part in (kv_c, keys[:, rank:]))
        # Every step of it is exact or correctly rounded, so that a GPU writes the same bits, sooner.
        return cache_layout.encode(kv_c, k_pe, layout, float(self.k_scale), case.scales).cpu()

    def meaning(self, entries: torch.Tensor, layout: str) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what entries mean."""
        there = entries.to(self.device)
        parts = cache_layout.decode_rows(there, layout, float(self.k_scale), *self.case.latent_dims, self.dtype)
        return torch.cat(parts, dim=-1).unsqueeze(1)

    def keys_by_request(self) -> Iterator[torch.Tensor]:  # [S, N, L + R] of each request, on the CPU
        keys = self.keys.float().cpu().expand(-1, self.case.heads, -1)
        return (keys[seen] for seen in segments(start_loc(self.totals)))

    @property
    def whole(self) -> calls.AttentionOperands | None:
        if not self.case.is_merged:
            return None
        codes = self.case.holds_codes
        return calls.AttentionOperands(**self.attended(self.keys, self.totals), causal=True, dequantised=codes)

    def attended(self, keys: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        """What calls say of the queries over these keys [S, 1, L + R], so many of each request."""
        starts = {"query_start_loc": self.query_start_loc, "key_start_loc": start_loc(lengths)}
        return {"q": self.queries, "k": keys, "v": keys[..., : self.case.kv_lora_rank], **starts}

    def metadata(self, lengths: Sequence[int], rank: int = 0) -> dict[str, Any]:
        case = self.case
        ranks = {"dcp_world_size": case.ranks, "dcp_rank": rank, "cp_kv_cache_interleave_size": case.interleave}
        return batch_metadata(self.query_lens, lengths, self.device, case.inflate) | ranks

    def new_of(self, held: Iterable[torch.Tensor]) -> torch.Tensor:
        """[S] bool, which tokens are new of those at these positions of each request."""
        batch = zip(held, self.totals, self.case.q, strict=False)
        return torch.cat([own >= total - q for own, total, q in batch])

    def held(self, rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Positions of each request's tokens that a rank holds, and the numbers of these among those of the batch."""
        if self.case.ranks == 1:
            held = list(map(torch.arange, self.totals))
        else:
            world = {"rank": rank, "world_size": self.case.ranks, "interleave": self.case.interleave}
            held = [
                torch.tensor(cache_layout.local_positions(total, **world), dtype=torch.int64) for total in self.totals
            ]
        return held, torch.cat([first + own for first, own in zip(start_loc(self.totals), held, strict=False)])


def batch_metadata(
    query_lens: Sequence[int], lengths: Sequence[int], device: torch.device, inflate: int = 1
) -> dict[str, Any]:
    """What any metadata say of requests of so many query tokens, each over so many keys; maxima times a factor."""
    cpu = torch.device("cpu")
    return {
        "query_start_loc": int32(start_loc(query_lens), device),
        "seq_lens": int32(lengths, device),
        "max_query_len": max(query_lens) * inflate,
        "max_seq_len": max(1, *lengths) * inflate,
        "query_lens_cpu": int32(query_lens, cpu),
        "seq_lens_cpu": int32(lengths, cpu),
    }


def list_metadata(
    told: dict[str, Any], table: torch.Tensor | None, space: str, *, paged: bool = True
) -> sparse.MLASparseMetadata:
    """The same with lists; of keys that lie in no cache the table [B] tells where those of each request begin."""

    lengths = told["query_lens_cpu"]
    return sparse.MLASparseMetadata(
        **told,
        req_id_per_token=torch.arange(len(lengths)).repeat_interleave(lengths).to(told["seq_lens"]),
        block_table=table if paged else None,
        workspace_starts=None if paged else table,
        index_space=roles.IndexSpace(space),
    )


def write_pages(
    draw: Draw[AnyCached], entries: torch.Tensor, lengths: Sequence[int], layout: str, page: int, guards: int = 0
) -> Pages:  # entries [S, width] of requests end to end in blocks drawn from all but the null block 0, between guards
    case, device, tokens = draw.case, draw.device, torch.tensor(lengths)
    counts = -(-tokens // page)
    order = torch.randperm(int(counts.sum()) + case.spare, generator=draw.drawing(case.seed)) + 1
    entries = entries.to(device)
    cache = poisoned_pages(case, 1 + len(order), entries, layout, page, guards)
    position = torch.arange(int(tokens.sum())) - (tokens.cumsum(0) - tokens).repeat_interleave(tokens)
    block = order[(counts.cumsum(0) - counts).repeat_interleave(tokens) + position // page]
    slots = block * page + position % page
    cache_layout.write_entries(cache, entries, slots.to(device), layout)
    return Pages(cache, block_table_of(case, counts, order).to(device), slots)


def gather_entries(
    case: CachedCase, entries: torch.Tensor, lengths: Sequence[int], device: torch.device, guards: int = 0
) -> Pages:
    """The entries [S, width] in pages of one token, each request's behind a few of poison; the table holds starts."""
    counts = torch.tensor(lengths)
    firsts = counts.cumsum(0) - counts
    starts = firsts + case.spare * torch.arange(1, len(lengths) + 1)
    slots = torch.arange(sum(lengths)) + (starts - firsts).repeat_interleave(counts)
    size = max(1, sum(lengths) + case.spare * (len(lengths) + 1))
    buffer = memory.poison((size + 2 * guards, 1, entries.shape[1]), entries.dtype, device, case.poison)
    gathered = buffer[guards : size + guards]
    gathered[slots.to(device), 0] = entries.to(device)
    return Pages(gathered, starts.int().to(device), slots)


def poisoned_pages(
    case: CachedCase, blocks: int, like: torch.Tensor, layout: str, page: int, guards: int
) -> torch.Tensor:
    """[blocks, page, width] of entries such as these [S, width]: poison, beside other layers' and between guards."""
    width, size, tiled = like.shape[1], blocks + 2 * guards, entry_formats.TILED_FORMATS.get(layout)
    elements = tiled.page_bytes(page) if tiled else page * width  # with what rounds a page up
    buffer = memory.poison((size, case.layers, elements), like.dtype, like.device, case.poison)
    return buffer[guards : size - guards, -1, : page * width].unflatten(1, (page, width))


def block_table_of(case: CachedCase, counts: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[B, max blocks] int32 of ``counts`` [B] blocks in order; the last columns are past every request's last page."""
    table = tails_of(case, order, len(counts), int(counts.max()) + _UNUSED_COLUMNS)
    table[torch.arange(table.shape[1]) < counts[:, None]] = order[: int(counts.sum())].int()
    if case.pad:
        table[-case.pad :] = -1
    return table


def tails_of(case: CachedCase, order: torch.Tensor, requests: int, width: int) -> torch.Tensor:
    if case.tails == "stale":
        return order[(torch.arange(requests)[:, None] + torch.arange(width)) % len(order)].int()
    filling = {"null": 0, "minus": -1, "huge": _HUGE}[case.tails]
    return torch.full((requests, width), filling, dtype=torch.int32)
