"""One token's entry in the latent cache: in the model's dtype, in e4m3, or as tiles of codes; written and read.

``auto``: L + R values of the model's dtype. ``fp8``: L + R e4m3 codes of value / k_scale, latent and rope alike. The
others are the names of ``entry_formats``; ``fp8_ds_mla``, 656 bytes for L 512 and R 64 or 0, has two kinds of scales: a
tile's largest magnitude over 448, as SGLang writes it (``float32``), or the next power of two, as vLLM and FlashMLA do
since 2026 (``pow2``). Other scales are exponents, of the next power of two, or the nearest e4m3 code, as the format
stores them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS, TiledFormat
from mla_conformance.reference.quantization import (
    BLOCK_ELEMENTS,
    E2M1_MAX,
    E4M3_MAX,
    dequantize_e2m1,
    dequantize_e4m3,
    next_exponent,
    quantize_e2m1,
    quantize_e4m3,
    require_float8,
)

CACHE_LAYOUTS = ("auto", "fp8", *TILED_FORMATS)
"""Layouts by the name that a configuration gives them."""
_LEAST_E4M3 = 2.0**-9
_EXPONENT_BIAS, _NOT_A_NUMBER = 127, 255
_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}


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
    """Dtype of the cache tensor. Raises ValueError for an unknown layout, or for a model dtype that it cannot hold."""
    require_layout(layout)
    if layout == "auto":
        return model_dtype
    require_float8()
    if layout == "fp8":
        return torch.float8_e4m3fn
    _check_form(TILED_FORMATS[layout], TILED_FORMATS[layout].coded, model_dtype)
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
    rows: Tensor,  # [S, entry_width] of :func:`cache_dtype`
    layout: str,
    k_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rope_dtype: torch.dtype = torch.bfloat16,  # dtype of the plain values of a tiled entry
) -> tuple[Tensor, Tensor]:
    """What S entries mean to a kernel that reads them: the consumer's formula, in float64.

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
    for cache in caches:  # as bytes: not every dtype can be indexed on every device
        data, pairs = cache.view(torch.uint8), src_to_dst.long().to(cache.device)
        data[pairs[:, 1]] = data[pairs[:, 0]]


def swap_blocks(src: Tensor, dst: Tensor, src_to_dst: Tensor) -> None:
    """Copy blocks of ``src`` into ``dst``, both [blocks, page, width] of one dtype, on any devices; ``src`` stays.

    src_to_dst: [n, 2] block numbers. Raises ValueError for a block outside its cache; then nothing is written.
    """
    _require_blocks(src_to_dst, src.shape[0], dst.shape[0])
    pairs = src_to_dst.long().cpu()
    source, target = src.view(torch.uint8), dst.view(torch.uint8)
    target[pairs[:, 1].to(dst.device)] = source[pairs[:, 0].to(src.device)].to(dst.device)


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


def encode_tiles(keys: Tensor, form: TiledFormat, tile_scales: str = "float32") -> Tensor:
    """The entries of keys [T, L + R] of the model's dtype: [T, form.width] uint8.

    tile_scales: one of :data:`TILE_SCALES`, of a form with float32 scales. Raises ValueError for another name, for keys
    wider than the form, or for a dtype other than 16 bits where plain values are stored.
    """
    require_float8()
    _check_form(form, keys.shape[-1], keys.dtype)

    def encoded(keys: Tensor) -> Tensor:
        tiles = keys[:, : form.coded].to(torch.float64).unflatten(-1, (form.tiles, form.tile))
        scales, stored = _scales(tiles.abs().amax(dim=-1) / _LARGEST[form.codes], form, tile_scales)
        plain = torch.nn.functional.pad(keys[:, form.coded :], (0, form.coded + form.plain - keys.shape[-1]))
        quotients = (tiles / scales.unsqueeze(-1)).flatten(1)
        if form.codes == "e4m3":
            codes = quantize_e4m3(quotients, 1.0)
        else:
            low, high = quantize_e2m1(quotients).unflatten(-1, (-1, 2)).unbind(-1)
            codes = low | high << 4
        parts = {
            "codes": codes,
            "scales": torch.nn.functional.pad(stored, (0, form.padding)),
            "plain": quantize_e4m3(plain, 1.0) if form.plain_codes else plain,
        }
        return torch.cat([parts[name].contiguous().view(torch.uint8) for name in form.order], dim=-1)

    return _by_blocks(encoded, keys)


def steady(keys: Tensor, form: TiledFormat, tile_scales: str, slack: float) -> Tensor:
    """[T, tiles] bool: tiles whose scale is the same for values that are larger or smaller by a ratio of ``slack``.

    keys, tile_scales: as of :func:`encode_tiles`. Scales of float32 numbers are steady, whatever they are.
    """
    tiles = keys[:, : form.coded].to(torch.float64).unflatten(-1, (form.tiles, form.tile))
    least = tiles.abs().amax(dim=-1) / _LARGEST[form.codes]
    if form.scales == "float32" and tile_scales == "float32":
        return torch.ones_like(least, dtype=torch.bool)
    low, high = (_scales(least * (1 + side * slack), form, tile_scales)[0] for side in (-1, 1))
    return low == high


def decode_tiles(rows: Tensor, form: TiledFormat, plain_dtype: torch.dtype) -> Tensor:
    """What entries [S, form.width] mean: keys [S, coded + plain] float64.

    plain_dtype: the model's. Raises ValueError for one other than 16 bits where plain values are stored.
    """
    _check_form(form, form.coded + form.plain, plain_dtype)

    def decoded(rows: Tensor) -> Tensor:
        parts = dict(zip(form.order, (part.contiguous() for part in rows.split(form.sizes, dim=-1)), strict=True))
        scales = _read_scales(parts["scales"][:, : form.scale_bytes - form.padding].contiguous(), form.scales)
        codes = parts["codes"]
        if form.codes == "e4m3":
            values = codes.view(torch.float8_e4m3fn).to(torch.float64)
        else:
            values = dequantize_e2m1(torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2))
        values = (values.unflatten(-1, (form.tiles, form.tile)) * scales.unsqueeze(-1)).flatten(1)
        if not form.plain:
            return values
        plain = parts["plain"].view(torch.float8_e4m3fn if form.plain_codes else plain_dtype)
        return torch.cat((values, plain.to(torch.float64)), dim=-1)

    return _by_blocks(decoded, rows)


def _by_blocks(convert: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """What rows are converted to, some at a time."""
    blocks = rows.split(max(1, BLOCK_ELEMENTS[rows.device.type] // rows.shape[1]))
    return torch.cat([convert(block) for block in blocks])


def _check_form(form: TiledFormat, width: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless keys so wide, of a model of this dtype, fit the form."""
    if not form.coded <= width <= form.coded + form.plain:
        raise ValueError(f"{form.name} holds {form.coded} to {form.coded + form.plain} columns of a key, got {width}")
    if form.plain and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{form.name} holds plain values of bfloat16 or float16, got {dtype}")


def _scales(least: Tensor, form: TiledFormat, tile_scales: str) -> tuple[Tensor, Tensor]:
    """Scales of tiles that need at least ``least`` [T, tiles], in float64 and as they are stored."""
    if tile_scales not in TILE_SCALES:
        raise ValueError(f"unknown tile scales {tile_scales!r}; expected one of {', '.join(TILE_SCALES)}")
    if form.scales == "e4m3":
        code = quantize_e4m3(least, 1.0).to(torch.float64).clamp(min=_LEAST_E4M3).to(torch.float8_e4m3fn)
        return code.to(torch.float64), code
    exponent = next_exponent(least.clamp(min=form.least_scale))
    if form.scales == "ue8m0":
        return torch.exp2(exponent), (exponent + _EXPONENT_BIAS).to(torch.uint8)
    number = torch.exp2(exponent).to(torch.float32) if tile_scales == "pow2" else least.to(torch.float32)
    # A tile of zeros, or one so small that its scale is not representable, must not be divided by 0.
    number = torch.where(number == 0, 1.0, number)
    return number.to(torch.float64), number


def _read_scales(data: Tensor, kind: str) -> Tensor:
    """Float64 of what is stored as bytes; a biased exponent with all bits set is not a number."""
    if kind != "ue8m0":
        return data.view(torch.float32 if kind == "float32" else torch.float8_e4m3fn).to(torch.float64)
    # As bits of a float64, which are the same on every device.
    powers = (data.to(torch.int64) + (1023 - _EXPONENT_BIAS)).bitwise_left_shift_(52).view(torch.float64)
    return powers.masked_fill(data == _NOT_A_NUMBER, torch.nan)
