"""The paged cache [num_blocks, page_size, width]: what MLA stores of the context, and which of several ranks holds it.

A slot is block · page_size + offset. Of W ranks and an interleave of I tokens, rank (t // I) % W holds token t, and
stores its own in order, without gaps.
Source: ``cp_kv_cache_interleave_size`` of vLLM.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.chunking import ContextChunk
from mla_conformance.reference.entry_formats import SHUFFLE, TILED_FORMATS, TiledFormat


@dataclass(frozen=True)
class PagedContext:
    """The context of a batch: where its latents lie, and how much of it may be expanded at a time."""

    cache: Tensor  # [num_blocks, page_size, L+R]
    block_table: Tensor  # [B, max_blocks] integers
    context_lens: tuple[int, ...]  # B lengths in tokens
    workspace_tokens: int  # as in `plan_context_chunks`


def write_latents(cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    """Write kv_c [T, L] and k_pe [T, R] into their slots, in place, converted to the cache's dtype."""
    write_rows(cache, torch.cat((kv_c, k_pe), dim=-1).to(cache.dtype), slot_mapping)


def write_rows(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write entries [T, width] of the cache's dtype into their slots [T], in place; -1 writes nothing."""
    page_size, num_slots = cache.shape[1], cache.shape[0] * cache.shape[1]
    if slot_mapping.shape != rows.shape[:1] or rows.shape[1:] != cache.shape[2:] or rows.dtype != cache.dtype:
        raise ValueError(
            f"expected one slot a token and rows of {cache.shape[2]} elements of {cache.dtype}, got "
            f"{tuple(slot_mapping.shape)} slots for rows {tuple(rows.shape)} of {rows.dtype}"
        )
    if not len(rows):
        return
    least, largest = torch.stack(slot_mapping.aminmax()).tolist()
    if least < -1 or largest >= num_slots:
        raise ValueError(
            f"expected slots in 0..{num_slots - 1}, or -1 for a token that is not stored, got {least}..{largest}"
        )
    # As bytes: float8 tensors cannot be indexed on every device.
    slots, data = slot_mapping.long(), rows.contiguous().view(torch.uint8)
    if least < 0:
        stored = (slots >= 0).nonzero()[:, 0]
        slots, data = slots[stored], data[stored]
    cache.view(torch.uint8)[slots // page_size, slots % page_size] = data


def write_entries(cache: Tensor, rows: Tensor, slots: Tensor, layout: str) -> None:
    """Write T entries as `write_rows` does, each where its layout has it; blocks are packed."""
    form, start = TILED_FORMATS.get(layout), 0
    if form is not None and form.shuffled:
        stored = slots >= 0
        at, offsets = _shuffled(cache, slots[stored].long(), form)
        cache.flatten(1)[at.unsqueeze(1), offsets] = rows[stored]
        return
    for part in page_parts(cache, layout):
        write_rows(part, rows[:, start : start + part.shape[2]], slots)
        start += part.shape[2]


def read_entries(cache: Tensor, slots: Tensor, layout: str) -> Tensor:
    """The entries [T, width] of slots [T] that a cache as of :func:`write_entries` has, in bytes where a layout is."""
    form, page, data = TILED_FORMATS.get(layout), cache.shape[1], cache.view(torch.uint8)
    if form is not None and form.shuffled:
        at, offsets = _shuffled(cache, slots, form)
        return data.flatten(1)[at.unsqueeze(1), offsets]
    return torch.cat([part[slots // page, slots % page] for part in page_parts(data, layout)], dim=-1).view(cache.dtype)


def _shuffled(cache: Tensor, slots: Tensor, form: TiledFormat) -> tuple[Tensor, Tensor]:
    """Blocks [T], and where in its block each byte of an entry stands [T, width], of codes that a page shuffles."""
    page = cache.shape[1]
    token = (slots % page).unsqueeze(1)
    column = torch.arange(form.code_bytes, device=slots.device)
    tile = token // SHUFFLE * (SHUFFLE * form.code_bytes) + column // SHUFFLE * SHUFFLE**2
    codes = tile + token % SHUFFLE * SHUFFLE + column % SHUFFLE
    behind = torch.arange(form.scale_bytes, device=slots.device)
    return slots // page, torch.cat((codes, page * form.code_bytes + token * form.scale_bytes + behind), dim=1)


def page_parts(cache: Tensor, layout: str) -> list[Tensor]:
    """Views [blocks, page, width of a part] of a cache; side by side they are its entries."""
    form, page = TILED_FORMATS.get(layout), cache.shape[1]
    if form is None or len(form.parts) == 1:
        return [cache]
    sizes = [page * width for width in form.parts]
    parts = cache.flatten(1)[:, : sum(sizes)].split(sizes, dim=1)
    return [part.unflatten(1, (page, width)) for part, width in zip(parts, form.parts, strict=True)]


def gather_latents(
    cache: Tensor, block_table: Tensor, chunk: ContextChunk, *, kv_lora_rank: int
) -> tuple[Tensor, Tensor]:
    """(kv_c [S, L], k_pe [S, width - L]) of a chunk of every request's context, requests one after another."""
    page_size, num_blocks = cache.shape[1], cache.shape[0]
    # [S] int64 on the CPU, of each token of the chunk: the number of its request, and its position there.
    starts, lengths = torch.tensor(chunk.starts, dtype=torch.long), torch.tensor(chunk.seq_lens, dtype=torch.long)
    request = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = (starts + lengths - lengths.cumsum(0))[request] + torch.arange(len(request))
    needed = int(position.amax()) // page_size + 1 if len(position) else 0
    if needed > block_table.shape[1]:
        raise ValueError(
            f"the block table is too short: a request needs {needed} blocks, its row holds {block_table.shape[1]}; "
            "widen the table or shorten the context"
        )
    request, position = request.to(cache.device), position.to(cache.device)
    blocks = block_table.to(cache.device)[request, position // page_size].long()
    if bool(((blocks < 0) | (blocks >= num_blocks)).any()):
        raise ValueError(
            f"expected blocks in 0..{num_blocks - 1}, got {blocks.min().item()}..{blocks.max().item()} "
            "among the pages that the context occupies"
        )
    latents = cache.view(torch.uint8)[blocks, position % page_size].view(cache.dtype)
    return latents[:, :kv_lora_rank], latents[:, kv_lora_rank:]


def local_length(length: int, *, rank: int, world_size: int, interleave: int) -> int:
    cycle = interleave * world_size
    rest = length % cycle - rank * interleave
    return length // cycle * interleave + min(max(rest, 0), interleave)


def local_positions(length: int, *, rank: int, world_size: int, interleave: int) -> tuple[int, ...]:
    """The positions, ascending, of those of the first ``length`` tokens that ``rank`` holds."""
    count = local_length(length, rank=rank, world_size=world_size, interleave=interleave)
    return tuple((index // interleave * world_size + rank) * interleave + index % interleave for index in range(count))
