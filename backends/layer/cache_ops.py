"""The paged latent cache of a layer, [blocks, page, entry], and what is done to it (vLLM's ops), rounded in float32.

Layouts are those of ``reference.cache_layout``. Indices on a device that captures a graph are not looked at.
"""

import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import dequantise, layout_of
from mla_conformance.reference import cache_layout
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.reference.quantization import E4M3_MAX

_LAYOUTS = ("auto", "fp8", "fp8_ds_mla")
_LATENT, _ROPE, _TILE = 512, 64, 128
_LEAST_SCALE = 1e-4
_TILES = _LATENT // _TILE


def known_layout(kv_cache_dtype: str, tile_scales: str = "float32") -> str:
    """The layout of that name; ValueError for another, or other ``tile_scales``, those of ``fp8_ds_mla`` entries."""
    if tile_scales not in TILE_SCALES:
        raise ValueError(f"expected tile scales of {', '.join(TILE_SCALES)}, got {tile_scales!r}")
    layout = layout_of(kv_cache_dtype)
    if layout not in _LAYOUTS:
        raise ValueError(f"expected a cache dtype of {', '.join(_LAYOUTS)}, got {kv_cache_dtype!r}")
    return layout


def entry_width(kv_cache_dtype: str, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of the cache's dtype that a token takes; ValueError for an unknown layout, or one without room."""
    return cache_layout.entry_width(known_layout(kv_cache_dtype), kv_lora_rank, qk_rope_head_dim)


def cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the cache tensor. Raises ValueError: an unknown layout, or one that does not store such a model."""
    return cache_layout.cache_dtype(known_layout(kv_cache_dtype), model_dtype)


def encode(kv_c: Tensor, k_pe: Tensor, kv_cache_dtype: str, scale: Tensor, tile_scales: str = "float32") -> Tensor:
    """[T, L] and [T, R] to entries [T, entry width] of the cache's dtype; see :func:`known_layout` for errors."""
    layout = known_layout(kv_cache_dtype, tile_scales)
    if layout == "auto":
        return torch.cat((kv_c, k_pe), dim=-1)
    if layout == "fp8":
        return _codes(torch.cat((kv_c, k_pe), dim=-1).float() / scale)
    tiles = kv_c.float().unflatten(-1, (_TILES, _TILE))
    amax = tiles.abs().amax(dim=-1, keepdim=True)
    if tile_scales == "float32":  # as SGLang writes them
        scales = torch.where(amax == 0, torch.ones_like(amax), amax / E4M3_MAX)
    else:  # the least at which a tile fits, and at least 2^-13, as vLLM and FlashMLA write since 2026
        scales = torch.exp2((amax / E4M3_MAX).clamp(min=_LEAST_SCALE).log2().ceil())
    rope = torch.nn.functional.pad(k_pe, (0, _ROPE - k_pe.shape[-1]))
    parts = (_codes(tiles / scales).flatten(-2), scales.squeeze(-1), rope.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def decode(entries: Tensor, kv_cache_dtype: str, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Entries [T, entry width] to latents [T, L + R] of the model's ``dtype``; see :func:`known_layout` for errors."""
    layout = known_layout(kv_cache_dtype)
    return (entries if layout == "auto" else dequantise(entries, layout, scale, dtype)).to(dtype)


def _codes(quotient: Tensor) -> Tensor:
    """Nearest e4m3, saturated: a cast alone makes NaN of what lies beyond 448."""
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def concat_and_cache_mla(
    kv_c: Tensor,  # [T, L] of the model's dtype
    k_pe: Tensor,  # [T, R] of the model's dtype
    kv_cache: Tensor,  # [blocks, page, entry]
    slot_mapping: Tensor,  # [up to T] integers; -1 writes nothing, and neither do the tokens past its end
    kv_cache_dtype: str,  # name of the layout
    scale: Tensor,  # float32 scalar tensor, of the layout ``fp8`` alone
    tile_scales: str = "float32",  # what the scales of an ``fp8_ds_mla`` entry are to be
) -> None:
    """Write tokens into their slots, in place; waits for nothing on the device but to refuse a slot outside of it."""
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
        # A row that is not stored repeats one that is; where none is, it writes back what slot 0 holds.
        entries, cache, slots = _raw(entries), _raw(kv_cache), slot_mapping.long()
        stored = slots >= 0
        first = stored.to(torch.int8).argmax()
        source = torch.where(stored, torch.arange(tokens, device=slots.device), first)
        target = slots[source].clamp(min=0)
        entries = torch.where(stored.any(), entries[source], cache[0, 0])
        cache[target // cache.shape[1], target % cache.shape[1]] = entries


def gather_cache(
    src_cache: Tensor,  # [blocks, page, entry]
    dst: Tensor,  # [tokens, L + R] of the model's dtype; its first ``cu_seq_lens[batch_size]`` rows are written
    block_table: Tensor,  # [B, max blocks] integers
    cu_seq_lens: Tensor,  # [B + 1] int32; which rows of ``dst`` are whose
    batch_size: int,  # B
    seq_starts: Tensor | None,  # [B] int32, the first token of each request that is collected; None means 0
    kv_cache_dtype: str,  # name of the layout
    scale: Tensor,  # float32 scalar tensor, of the layout ``fp8`` alone
) -> None:
    """Collect a part of each request's cached latents, requests one after another, dequantised; refuses misfits."""
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
    column = token // page
    needed = int(column.max()) + 1
    if needed > block_table.shape[1]:
        raise ValueError(
            f"the block table is too short: a request needs {needed} blocks, a row holds {block_table.shape[1]}; "
            "widen the table or shorten the sequence"
        )
    blocks = block_table[request, column].long()
    _check_range("block", blocks, 0, src_cache.shape[0], "for every page that a sequence occupies")
    entries = _raw(src_cache)[blocks, token % page].view(src_cache.dtype)
    dst[:total] = decode(entries, kv_cache_dtype, dst.dtype, scale)[:, : dst.shape[1]]


def swap_blocks(src: Tensor, dst: Tensor, src_to_dst: Tensor) -> None:
    """Copy whole blocks, [copies, 2] integers, from one cache to another or within one; all are read first."""
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


def _raw(x: Tensor) -> Tensor:
    """Codes as bytes: torch indexes these on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def may_look_at(x: Tensor) -> bool:
    """Whether reading ``x`` disturbs no capture of a graph."""
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_range(what: str, index: Tensor, low: int, high: int, remark: str) -> None:
    if not index.numel() or not may_look_at(index):
        return
    smallest, largest = torch.stack(index.aminmax()).tolist()
    if smallest < low or largest >= high:
        raise ValueError(f"expected {what}s in 0..{high - 1}, {remark}, got {smallest}..{largest}")
