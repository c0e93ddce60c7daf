"""What a layer does to the paged latent cache: write, gather, copy and swap blocks, advance a step (vLLM's ops).

A cache is [blocks, page, entry]; its stride between blocks may exceed a packed block. A slot is block · page + offset.
Indices on a device that is capturing a graph are not looked at: reading them would wait for it.
"""

from collections.abc import Sequence

import torch

from mla_conformance.backends.layer.cache_format import cache_dtype, decode, encode, entry_width, known_layout


def concat_and_cache_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    tile_scales: str = "float32",
) -> None:
    """Write tokens into their slots, in place; waits for nothing on the device but to refuse a bad slot.

    Args:
        kv_c: [T, L] of the model's dtype.
        k_pe: [T, R] of the model's dtype.
        kv_cache: [blocks, page, entry].
        slot_mapping: [up to T] integers; -1 writes nothing, and neither do the tokens past its end.
        kv_cache_dtype: name of the layout.
        scale: float32 scalar tensor, of the layout ``fp8`` alone.
        tile_scales: what the scales of an ``fp8_ds_mla`` entry are to be.

    Raises:
        ValueError: an unknown layout, a cache of another layout, or a slot outside of the cache.
    """
    layout = known_layout(kv_cache_dtype, tile_scales)
    width, dtype = entry_width(layout, kv_c.shape[-1], k_pe.shape[-1]), cache_dtype(layout, kv_c.dtype)
    if kv_cache.dim() != 3 or kv_cache.shape[-1] != width or kv_cache.dtype != dtype:
        raise ValueError(
            f"cache dtype {kv_cache_dtype}: expected a cache [blocks, page, {width}] of {dtype}, got "
            f"{list(kv_cache.shape)} of {kv_cache.dtype}"
        )
    tokens = slot_mapping.shape[0]
    if tokens > kv_c.shape[0] or kv_c.shape[0] != k_pe.shape[0]:
        raise ValueError(
            f"expected a latent and a rotated key for each of {tokens} slots, got {kv_c.shape[0]} and {k_pe.shape[0]}"
        )
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    _check_range("slot", slot_mapping, -1, num_slots, "or -1 for a token that is not stored")
    if tokens:
        entries = encode(kv_c[:tokens], k_pe[:tokens], layout, scale, tile_scales)
        _scatter(_raw(entries), _raw(kv_cache), slot_mapping.long())


def _scatter(entries: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the ``entries`` [T, entry], T > 0, whose slot is not -1, without asking the device which these are."""
    stored = slots >= 0
    first = stored.to(torch.int8).argmax()
    # A row that is not stored repeats one that is; where none is, it writes back what slot 0 holds.
    source = torch.where(stored, torch.arange(len(slots), device=slots.device), first)
    target = slots[source].clamp(min=0)
    entries = torch.where(stored.any(), entries[source], cache[0, 0])
    cache[target // cache.shape[1], target % cache.shape[1]] = entries


def gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None,
    kv_cache_dtype: str,
    scale: torch.Tensor,
) -> None:
    """Collect a part of each request's cached latents, requests one after another, dequantised.

    Args:
        src_cache: [blocks, page, entry].
        dst: [tokens, L + R] of the model's dtype; its first ``cu_seq_lens[batch_size]`` rows are written.
        block_table: [B, max blocks] integers.
        cu_seq_lens: [B + 1] int32; which rows of ``dst`` are whose.
        batch_size: B.
        seq_starts: [B] int32, the first token of each request that is collected; None means 0.
        kv_cache_dtype: name of the layout.
        scale: float32 scalar tensor, of the layout ``fp8`` alone.

    Raises:
        ValueError: an unknown layout, a ``dst`` or a block table that is too short, or a block outside of the cache.
    """
    page, bounds = src_cache.shape[1], cu_seq_lens[: batch_size + 1].long()
    total = int(bounds[-1])
    if total > dst.shape[0]:
        raise ValueError(f"expected room for {total} gathered tokens, got {dst.shape[0]}; enlarge the workspace")
    if not total:
        return
    request = torch.arange(batch_size, device=bounds.device).repeat_interleave(bounds.diff(), output_size=total)
    token = torch.arange(total, device=bounds.device) - bounds[request]
    if seq_starts is not None:
        token = token + seq_starts[:batch_size].long()[request]
    blocks = _blocks_of(block_table, request, token // page, src_cache.shape[0])
    entries = _raw(src_cache)[blocks, token % page].view(src_cache.dtype)
    dst[:total] = decode(entries, kv_cache_dtype, dst.dtype, scale)[:, : dst.shape[1]]


def _blocks_of(block_table: torch.Tensor, request: torch.Tensor, column: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Physical blocks of logical ones; ValueError for a table that is too short or names a block that is not there."""
    needed = int(column.max()) + 1
    if needed > block_table.shape[1]:
        raise ValueError(
            f"the block table is too short: a request needs {needed} blocks, a row holds {block_table.shape[1]}; "
            "widen the table or shorten the sequence"
        )
    blocks = block_table[request, column].long()
    _check_range("block", blocks, 0, num_blocks, "for every page that a sequence occupies")
    return blocks


def copy_blocks_mla(kv_caches: Sequence[torch.Tensor], src_to_dst: torch.Tensor) -> None:
    """Copy whole blocks within each layer's cache; all are read before the first is written.

    Args:
        kv_caches: [blocks, page, entry] of each layer.
        src_to_dst: [copies, 2] integers.

    Raises:
        ValueError: a block outside of a cache, or one that is written twice.
    """
    for cache in kv_caches:
        swap_blocks(cache, cache, src_to_dst)


def swap_blocks(src: torch.Tensor, dst: torch.Tensor, src_to_dst: torch.Tensor) -> None:
    """Copy whole blocks from one cache to another, such as between a GPU and the host.

    Args:
        src: [blocks, page, entry].
        dst: [blocks, page, entry] of the same page and entry.
        src_to_dst: [copies, 2] integers.

    Raises:
        ValueError: caches of different pages, a block outside of a cache, or one that is written twice.
    """
    if src.shape[1:] != dst.shape[1:] or src.dtype != dst.dtype:
        raise ValueError(
            f"expected caches of one page and dtype, got {list(src.shape)} of {src.dtype} and {list(dst.shape)} of "
            f"{dst.dtype}"
        )
    pairs = src_to_dst.long().reshape(-1, 2)
    _check_range("source block", pairs[:, 0], 0, src.shape[0], "of the source cache")
    _check_range("destination block", pairs[:, 1], 0, dst.shape[0], "of the destination cache")
    if len(pairs[:, 1].unique()) != len(pairs):
        raise ValueError(f"expected each destination block once, got {pairs[:, 1].tolist()}; drop the duplicates")
    copied = _raw(src)[pairs[:, 0].to(src.device)].to(dst.device)
    _raw(dst)[pairs[:, 1].to(dst.device)] = copied


def advance_step(
    num_seqs: int,
    num_queries: int,
    block_size: int,
    input_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor | None,
    input_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Turn one decode step's inputs into the next one's, in place; rows of padding stay as they are.

    Args:
        num_seqs: requests, padding included.
        num_queries: requests that count, the first ones.
        block_size: tokens of a page.
        input_tokens: [num_seqs] int64, receives the sampled tokens.
        sampled_token_ids: [num_queries] or [num_queries, 1]; None leaves ``input_tokens``.
        input_positions: [num_seqs] int64, receives the tokens' positions.
        seq_lens: [num_seqs] int32, grows by 1.
        slot_mapping: [num_seqs] int64, receives the tokens' slots.
        block_tables: [num_seqs, max blocks] int32.

    Raises:
        ValueError: more queries than sequences, or a block table without a page for the next token.
    """
    if not 0 <= num_queries <= num_seqs:
        raise ValueError(f"expected at most {num_seqs} queries, the number of sequences, got {num_queries}")
    if not num_queries:
        return
    position = seq_lens[:num_queries].long()
    request = torch.arange(num_queries, device=position.device)
    columns = block_tables.shape[1]
    if _may_look_at(position) and int(position.max()) // block_size >= columns:
        raise ValueError(
            f"the block table is too short: the next token of a sequence of {int(position.max())} needs "
            f"{int(position.max()) // block_size + 1} blocks of {block_size} tokens, a row holds {columns}"
        )
    if sampled_token_ids is not None:
        input_tokens[:num_queries] = sampled_token_ids.flatten()[:num_queries]
    input_positions[:num_queries] = position
    seq_lens[:num_queries] += 1
    block = block_tables[request, position // block_size].long()
    slot_mapping[:num_queries] = block * block_size + position % block_size


def _raw(x: torch.Tensor) -> torch.Tensor:
    """Codes as bytes: torch indexes these on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _may_look_at(x: torch.Tensor) -> bool:
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_range(what: str, index: torch.Tensor, low: int, high: int, remark: str) -> None:
    """ValueError unless low <= index < high."""
    if not index.numel() or not _may_look_at(index):
        return
    smallest, largest = (int(x) for x in index.aminmax())
    if smallest < low or largest >= high:
        raise ValueError(f"expected {what}s in 0..{high - 1}, {remark}, got {smallest}..{largest}")
