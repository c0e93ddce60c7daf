"""What one token's entry in the latent cache looks like: in the model's dtype, in e4m3, or as tiles of codes.

``auto``: L + R values of the model's dtype. ``fp8``: L + R e4m3 codes of value / k_scale, latent and rope alike. The
others are the names of ``entry_formats``; ``fp8_ds_mla``, 656 bytes for L 512 and R 64 or 0, has two kinds of scales: a
tile's largest magnitude over 448, as SGLang writes it (``float32``), or the next power of two, as vLLM and FlashMLA do
since 2026 (``pow2``).
"""

import torch
from torch import Tensor

from mla_conformance.reference.entry_formats import TILED_FORMATS, TiledFormat
from mla_conformance.reference.quantization import dequantize_e4m3, quantize_e4m3, require_float8
from mla_conformance.reference.tiled_entries import check_form, decode_tiles, encode_tiles

CACHE_LAYOUTS = ("auto", "fp8", *TILED_FORMATS)
"""Layouts by the name that a configuration gives them."""


def require_layout(layout: str) -> str:
    """The name, or ValueError for one that no layout has."""
    if layout not in CACHE_LAYOUTS:
        raise ValueError(f"unknown cache layout {layout!r}; expected one of {', '.join(CACHE_LAYOUTS)}")
    return layout


def entry_width(layout: str, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of :func:`cache_dtype` in one token's entry.

    Raises ValueError for an unknown layout or for dims that it has no form for.
    """
    form = TILED_FORMATS.get(require_layout(layout))
    if form is None:
        return kv_lora_rank + qk_rope_head_dim
    _require_dims(form, kv_lora_rank, qk_rope_head_dim)
    return form.width


def cache_dtype(layout: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the cache tensor.

    Raises ValueError for an unknown layout, or for a model dtype that it cannot hold.
    """
    require_layout(layout)
    if layout == "auto":
        return model_dtype
    require_float8()
    if layout == "fp8":
        return torch.float8_e4m3fn
    check_form(TILED_FORMATS[layout], TILED_FORMATS[layout].coded, model_dtype)
    return torch.uint8


def encode(kv_c: Tensor, k_pe: Tensor, layout: str, k_scale: float, tile_scales: str = "float32") -> Tensor:
    """The entries of T tokens.

    kv_c: [T, L]. k_pe: [T, R], of the same dtype, the model's. k_scale: what an ``fp8`` code of 1.0 stands for; no
    other layout depends on it. tile_scales: one of :data:`TILE_SCALES`, of ``fp8_ds_mla``. Returns [T, entry_width] of
    :func:`cache_dtype`.
    Raises ValueError for an unknown layout, shapes that do not fit it, or a scale that is not positive.
    """
    require_layout(layout)
    if kv_c.dim() != 2 or k_pe.dim() != 2 or kv_c.shape[0] != k_pe.shape[0]:
        raise ValueError(f"expected latents [T, L] and rope keys [T, R], got {list(kv_c.shape)} and {list(k_pe.shape)}")
    if layout == "auto":
        return torch.cat((kv_c, k_pe), dim=-1)
    if layout == "fp8":
        return quantize_e4m3(torch.cat((kv_c, k_pe), dim=-1), k_scale)
    _require_dims(TILED_FORMATS[layout], kv_c.shape[1], k_pe.shape[1])
    return encode_tiles(torch.cat((kv_c, k_pe), dim=-1), TILED_FORMATS[layout], tile_scales)


def decode_rows(
    rows: Tensor,
    layout: str,
    k_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rope_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """What S entries mean to a kernel that reads them: the consumer's formula, in float64.

    rows: [S, entry_width] of :func:`cache_dtype`. rope_dtype: dtype of the plain values of a tiled entry.
    Returns (kv_c [S, L], k_pe [S, R]). Raises ValueError for an unknown layout or rows of another width.
    """
    width = entry_width(layout, kv_lora_rank, qk_rope_head_dim)
    if rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"expected {layout} entries [S, {width}], got {list(rows.shape)}")
    if layout in TILED_FORMATS:
        values = decode_tiles(rows, TILED_FORMATS[layout], rope_dtype)
    else:
        values = rows.to(torch.float64) if layout == "auto" else dequantize_e4m3(rows, k_scale)
    return values[:, :kv_lora_rank], values[:, kv_lora_rank : kv_lora_rank + qk_rope_head_dim]


def copy_blocks(caches: list[Tensor], src_to_dst: Tensor) -> None:
    """Copy whole blocks within each cache [blocks, page, width], as if all were read before any is written.

    src_to_dst: [n, 2] block numbers. Raises ValueError for a block outside a cache; then nothing is written.
    """
    for cache in caches:
        _require_blocks(src_to_dst, cache.shape[0], cache.shape[0])
    for cache in caches:
        data, pairs = _bytes(cache), src_to_dst.long().to(cache.device)
        data[pairs[:, 1]] = data[pairs[:, 0]]


def swap_blocks(src: Tensor, dst: Tensor, src_to_dst: Tensor) -> None:
    """Copy blocks of ``src`` into ``dst``, both [blocks, page, width] of one dtype, on any devices; ``src`` stays.

    src_to_dst: [n, 2] block numbers. Raises ValueError for a block outside its cache; then nothing is written.
    """
    _require_blocks(src_to_dst, src.shape[0], dst.shape[0])
    pairs = src_to_dst.long().cpu()
    _bytes(dst)[pairs[:, 1].to(dst.device)] = _bytes(src)[pairs[:, 0].to(src.device)].to(dst.device)


def _bytes(cache: Tensor) -> Tensor:
    """The same memory as bytes: not every dtype can be indexed on every device."""
    return cache.view(torch.uint8)


def _require_dims(form: TiledFormat, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    if (kv_lora_rank, qk_rope_head_dim) not in form.dims:
        held = " or ".join(f"{latent} and {rope}" for latent, rope in form.dims)
        raise ValueError(
            f"{form.name} holds latents and rope keys of {held}, got {kv_lora_rank} and {qk_rope_head_dim}"
        )


def _require_blocks(pairs: Tensor, sources: int, destinations: int) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"expected pairs of blocks [n, 2], got {list(pairs.shape)}")
    for blocks, count in ((pairs[:, 0], sources), (pairs[:, 1], destinations)):
        if bool(((blocks < 0) | (blocks >= count)).any()):
            raise ValueError(f"expected blocks in 0..{count - 1}, got {blocks.min().item()}..{blocks.max().item()}")
