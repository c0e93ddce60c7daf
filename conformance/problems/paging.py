"""The pages of a decode case: entries in shuffled blocks, and poison in every byte that no request owns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import Draw
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.kv_cache import write_entries

_UNUSED_COLUMNS = 2
_HUGE = 2**31 - 1
AnyPaged = TypeVar("AnyPaged", bound=CachedCase)


@dataclass(frozen=True)
class Pages:
    """A cache and where the requests' tokens are in it.

    Attributes:
        cache: [blocks, page, width]; a slice of a buffer of several layers if the case says so.
        block_table: [B, max blocks] int32, on the cache's device; of gathered entries [B], where each request begins.
        slots: [S] int64, on the CPU; where each token's entry stands, block · page + offset.
    """

    cache: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class PageForm:
    """What a page is.

    Attributes:
        layout: of its entries.
        tokens: how many it holds.
        guards: blocks of poison before the first one and behind the last, which no number names.
    """

    layout: str
    tokens: int
    guards: int = 0

    @staticmethod
    def of(case: CachedCase) -> "PageForm":
        return PageForm(case.cache, case.page)

    def elements(self, width: int) -> int:
        """Elements of a page of entries so wide, with what rounds it up."""
        form = TILED_FORMATS.get(self.layout)
        return self.tokens * width if form is None else form.page_bytes(self.tokens)


def write_pages(draw: Draw[AnyPaged], form: PageForm, entries: torch.Tensor, lengths: Sequence[int]) -> Pages:
    """Store the entries [S, width] of requests laid end to end, in blocks drawn from all but block 0.

    Block 0 is the null block that engines never hand out; it is poisoned like every entry past a request's last token.
    A request without tokens pads a graph's batch, if the case has such rows, or has no key on this rank.
    """
    case, device, tokens = draw.case, draw.device, torch.tensor(lengths)
    counts = -(-tokens // form.tokens)
    order = torch.randperm(int(counts.sum()) + case.spare, generator=draw.drawing(case.seed)) + 1
    cache = poisoned_pages(case, form, 1 + len(order), entries, device)
    position = _positions(tokens)
    block = order[(counts.cumsum(0) - counts).repeat_interleave(tokens) + position // form.tokens]
    slots = block * form.tokens + position % form.tokens
    write_entries(cache, entries.to(device), slots.to(device), form.layout)
    return Pages(cache, block_table_of(case, counts, order).to(device), slots)


def gather_entries(
    case: CachedCase, entries: torch.Tensor, lengths: Sequence[int], device: torch.device, guards: int = 0
) -> Pages:
    """The entries [S, width] in pages of one token, each request's behind a few of poison; the table holds starts.

    So many ``guards`` of poison stand before and behind all of them.
    """
    counts = torch.tensor(lengths)
    starts = counts.cumsum(0) - counts + case.spare * torch.arange(1, len(lengths) + 1)
    slots = starts.repeat_interleave(counts) + _positions(counts)
    size = max(1, sum(lengths) + case.spare * (len(lengths) + 1))
    buffer = poison((size + 2 * guards, 1, entries.shape[1]), entries.dtype, device, case.poison)
    gathered = buffer[guards : size + guards]
    gathered[slots.to(device), 0] = entries.to(device)
    return Pages(gathered, starts.int().to(device), slots)


def _positions(lengths: torch.Tensor) -> torch.Tensor:
    """0 … n - 1 for each length n, end to end."""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def poisoned_pages(
    case: CachedCase, form: PageForm, blocks: int, like: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """[blocks, page, width] of entries such as these [S, width]: poison, beside other layers' and between guards."""
    width = like.shape[1]
    size = blocks + 2 * form.guards
    buffer = poison((size, case.layers, form.elements(width)), like.dtype, device, case.poison)
    inside = buffer[form.guards : size - form.guards, -1, : form.tokens * width]
    return inside.unflatten(1, (form.tokens, width))


def block_table_of(case: CachedCase, counts: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[B, max blocks] int32; the last columns are past every request's last page.

    Args:
        case: what it is for.
        counts: [B] blocks of each request.
        order: blocks, those of the first request first.
    """
    table = tails_of(case, order, len(counts), int(counts.max()) + _UNUSED_COLUMNS)
    table[torch.arange(table.shape[1]) < counts[:, None]] = order[: int(counts.sum())].int()
    if case.pad:
        table[-case.pad :] = -1
    return table


def tails_of(case: CachedCase, order: torch.Tensor, requests: int, width: int) -> torch.Tensor:
    """What stands past the last page of each request."""
    if case.tails == "stale":
        return order[(torch.arange(requests)[:, None] + torch.arange(width)) % len(order)].int()
    filling = {"null": 0, "minus": -1, "huge": _HUGE}[case.tails]
    return torch.full((requests, width), filling, dtype=torch.int32)
