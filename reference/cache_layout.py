"""What one token's entry in the latent cache looks like: in the model's dtype, in e4m3, or in DeepSeek's mixed layout.

``auto``: L + R values of the model's dtype. ``fp8``: L + R e4m3 codes of value / k_scale, latent and rope alike.
``fp8_ds_mla``: 656 bytes for L 512 and R 64: 512 e4m3 codes in four tiles of 128, the four tiles' float32 scales, 64
rope values of the 16-bit model dtype; 0 there for a model without rope. Source of the last: vLLM's
``concat_and_cache_ds_mla``, FlashMLA's FP8 cache. A tile's scale is its largest magnitude over 448, as SGLang writes it
(``float32``), or the next power of two, as vLLM and FlashMLA do since 2026 (``pow2``).
"""

import torch
from torch import Tensor

from mla_conformance.reference.quantization import E4M3_MAX, dequantize_e4m3, quantize_e4m3, require_float8
from mla_conformance.reference.tile_scales import TILE_SCALES

CACHE_LAYOUTS = ("auto", "fp8", "fp8_ds_mla")
"""Layouts by the name that a configuration gives them."""

DS_MLA_BYTES = 656
"""Bytes of an ``fp8_ds_mla`` entry: 512 codes, 4 · 4 bytes of scales, 64 · 2 bytes of rope."""

_DS_DIMS = ((512, 64), (512, 0))
_LEAST_SCALE = 1e-4
"""Of a power of two before it is rounded up, for tiles of zeros and small ones: 2^-13."""
_DS_TILE = 128
_DS_SCALES = slice(512, 528)
_DS_ROPE = slice(528, DS_MLA_BYTES)


def entry_width(layout: str, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of :func:`cache_dtype` in one token's entry.

    Raises ValueError for an unknown layout or for dims that it has no form for.
    """
    _require_layout(layout)
    if layout != "fp8_ds_mla":
        return kv_lora_rank + qk_rope_head_dim
    _require_ds_dims(kv_lora_rank, qk_rope_head_dim)
    return DS_MLA_BYTES


def cache_dtype(layout: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the cache tensor.

    Raises ValueError for an unknown layout, or for a model dtype that ``fp8_ds_mla`` cannot hold.
    """
    _require_layout(layout)
    if layout == "auto":
        return model_dtype
    require_float8()
    if layout == "fp8":
        return torch.float8_e4m3fn
    _require_16_bits(model_dtype)
    return torch.uint8


def encode(kv_c: Tensor, k_pe: Tensor, layout: str, k_scale: float, tile_scales: str = "float32") -> Tensor:
    """The entries of T tokens.

    kv_c: [T, L]. k_pe: [T, R], of the same dtype, the model's. k_scale: what an ``fp8`` code of 1.0 stands for; no
    other layout depends on it. tile_scales: one of :data:`TILE_SCALES`, of ``fp8_ds_mla``. Returns [T, entry_width] of
    :func:`cache_dtype`.
    Raises ValueError for an unknown layout, shapes that do not fit it, or a scale that is not positive.
    """
    _require_layout(layout)
    if kv_c.dim() != 2 or k_pe.dim() != 2 or kv_c.shape[0] != k_pe.shape[0]:
        raise ValueError(f"expected latents [T, L] and rope keys [T, R], got {list(kv_c.shape)} and {list(k_pe.shape)}")
    if layout == "auto":
        return torch.cat((kv_c, k_pe), dim=-1)
    if layout == "fp8":
        return quantize_e4m3(torch.cat((kv_c, k_pe), dim=-1), k_scale)
    return _encode_ds_mla(kv_c, k_pe, tile_scales)


def decode_rows(
    rows: Tensor,
    layout: str,
    k_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rope_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """What S entries mean to a kernel that reads them: the consumer's formula, in float64.

    rows: [S, entry_width] of :func:`cache_dtype`. rope_dtype: dtype of the rope values of an ``fp8_ds_mla`` entry.
    Returns (kv_c [S, L], k_pe [S, R]). Raises ValueError for an unknown layout or rows of another width.
    """
    width = entry_width(layout, kv_lora_rank, qk_rope_head_dim)
    if rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"expected {layout} entries [S, {width}], got {list(rows.shape)}")
    if layout == "fp8_ds_mla":
        return _decode_ds_mla(rows, qk_rope_head_dim, rope_dtype)
    values = rows.to(torch.float64) if layout == "auto" else dequantize_e4m3(rows, k_scale)
    return values[:, :kv_lora_rank], values[:, kv_lora_rank:]


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


def _encode_ds_mla(kv_c: Tensor, k_pe: Tensor, tile_scales: str) -> Tensor:
    _require_ds_dims(kv_c.shape[1], k_pe.shape[1])
    _require_16_bits(k_pe.dtype)
    require_float8()
    tiles = kv_c.to(torch.float64).unflatten(-1, (-1, _DS_TILE))
    scales = _tile_scales(tiles.abs().amax(dim=-1) / E4M3_MAX, tile_scales)
    codes = quantize_e4m3(tiles / scales.to(torch.float64).unsqueeze(-1), 1.0)
    rope = torch.nn.functional.pad(k_pe, (0, _DS_DIMS[0][1] - k_pe.shape[1]))
    parts = (codes.flatten(1), scales, rope)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def _tile_scales(least: Tensor, kind: str) -> Tensor:
    """Float32 scales of tiles that need at least ``least``, float64."""
    if kind == "pow2":
        return torch.exp2(least.clamp(min=_LEAST_SCALE).log2().ceil()).to(torch.float32)
    if kind not in TILE_SCALES:
        raise ValueError(f"unknown tile scales {kind!r}; expected one of {', '.join(TILE_SCALES)}")
    scales = least.to(torch.float32)
    # A tile of zeros, or one so small that its scale is not representable, must not be divided by 0.
    return torch.where(scales == 0, 1.0, scales)


def _decode_ds_mla(rows: Tensor, qk_rope_head_dim: int, rope_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _require_16_bits(rope_dtype)
    codes = rows[:, : _DS_SCALES.start].contiguous().view(torch.float8_e4m3fn)
    scales = rows[:, _DS_SCALES].contiguous().view(torch.float32).to(torch.float64)
    values = codes.to(torch.float64).unflatten(-1, (-1, _DS_TILE)) * scales.unsqueeze(-1)
    rope = rows[:, _DS_ROPE].contiguous().view(rope_dtype).to(torch.float64)
    return values.flatten(1), rope[:, :qk_rope_head_dim]


def _bytes(cache: Tensor) -> Tensor:
    """The same memory as bytes: not every dtype can be indexed on every device."""
    return cache.view(torch.uint8)


def _require_layout(layout: str) -> None:
    if layout not in CACHE_LAYOUTS:
        raise ValueError(f"unknown cache layout {layout!r}; expected one of {', '.join(CACHE_LAYOUTS)}")


def _require_ds_dims(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    if (kv_lora_rank, qk_rope_head_dim) not in _DS_DIMS:
        raise ValueError(
            f"fp8_ds_mla holds latents of 512 and rope keys of 64 or none, got {kv_lora_rank} and {qk_rope_head_dim}"
        )


def _require_16_bits(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"fp8_ds_mla holds rope keys of bfloat16 or float16, got {dtype}")


def _require_blocks(pairs: Tensor, sources: int, destinations: int) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"expected pairs of blocks [n, 2], got {list(pairs.shape)}")
    for blocks, count in ((pairs[:, 0], sources), (pairs[:, 1], destinations)):
        if bool(((blocks < 0) | (blocks >= count)).any()):
            raise ValueError(f"expected blocks in 0..{count - 1}, got {blocks.min().item()}..{blocks.max().item()}")
