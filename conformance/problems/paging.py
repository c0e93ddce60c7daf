"""The pages of a decode case: entries in shuffled blocks, and poison in every byte that no request owns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_conformance.cases.case import Case
from mla_conformance.problems.memory import poison
from mla_conformance.reference.kv_cache import write_rows

_UNUSED_COLUMNS = 2
_HUGE = 2**31 - 1


@dataclass(frozen=True)
class Pages:
    """A cache and where the requests' tokens are in it.

    Attributes:
        cache: [blocks, page, width]; a slice of a buffer of several layers if the case says so.
        block_table: [B, max blocks] int32, on the cache's device.
    """

    cache: torch.Tensor
    block_table: torch.Tensor


def write_pages(case: Case, requests: Sequence[torch.Tensor], device: torch.device) -> Pages:
    """Store the entries [tokens, width] of every request, in blocks drawn from all but block 0.

    Block 0 is the null block that engines never hand out; it is poisoned like every entry past a request's last token.
    A request without tokens pads a graph's batch, if the case has such rows, or has no key on this rank.
    """
    counts = [-(-len(rows) // case.page) for rows in requests]
    total = 1 + sum(counts) + case.spare
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(case.seed)) + 1
    blocks = order[: sum(counts)].split(counts)
    cache = _poisoned(case, total, requests[0], device)
    slots = [
        ids.repeat_interleave(case.page)[: len(rows)] * case.page + torch.arange(len(rows)) % case.page
        for ids, rows in zip(blocks, requests, strict=True)
    ]
    write_rows(cache, torch.cat([rows.to(device) for rows in requests]), torch.cat(slots).to(device))
    return Pages(cache, _block_table(case, blocks, order).to(device))


def _poisoned(case: Case, blocks: int, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    buffer = poison((blocks, case.layers, case.page, like.shape[1]), like.dtype, device, case.poison)
    return buffer[:, -1]


def _block_table(case: Case, blocks: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """[B, max blocks] int32; the last columns are past every request's last page."""
    width = max(len(ids) for ids in blocks) + _UNUSED_COLUMNS
    table = torch.stack([_tail(case, order, request, width) for request in range(len(blocks))])
    for row, ids in zip(table, blocks, strict=True):
        row[: len(ids)] = ids
    if case.pad:
        table[-case.pad :] = -1
    return table


def _tail(case: Case, order: torch.Tensor, request: int, width: int) -> torch.Tensor:
    """A row of what stands past the last page."""
    if case.tails == "stale":
        return order.roll(-request)[torch.arange(width) % len(order)].int()
    filling = {"null": 0, "minus": -1, "huge": _HUGE}[case.tails]
    return torch.full((width,), filling, dtype=torch.int32)
