"""The latent cache: entries in the model's dtype, in e4m3 or as tiles of codes, and where in its pages they stand.

``auto``: L + R values of the model's dtype. ``fp8``: L + R e4m3 codes of value / k_scale. The others: `entry_formats`.
A cache is [num_blocks, page_size, width], a slot block · page_size + offset. Of W ranks and an interleave of I tokens,
rank (t // I) % W holds token t, and stores its own in order, without gaps (vLLM's ``cp_kv_cache_interleave_size``).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.reference import quantization
from mla_conformance.reference.entry_formats import SHUFFLE, TILE_SCALES, TILED_FORMATS, TiledFormat

CACHE_LAYOUTS = ("auto", "fp8", *TILED_FORMATS)  # layouts by the name that a configuration gives them
_LEAST_E4M3 = 2.0**-9
_EXPONENT_BIAS, _NOT_A_NUMBER = 127, 255
_LARGEST = {"e4m3": quantization.E4M3_MAX, "e2m1": quantization.E2M1_MAX}


def require_layout(layout: str) -> str:
    if layout not in CACHE_LAYOUTS:
        raise ValueError(f"unknown cache layout {layout!r}; expected one of {', '.join(CACHE_LAYOUTS)}")
    return layout


def entry_width(layout: str, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of :func:`cache_dtype` in one token's entry; ValueError for dims that the layout has no form for."""
    form = TILED_FORMATS.get(require_layout(layout))
    if form is None:
        return kv_lora_rank + qk_rope_head_dim
    if (kv_lora_rank, qk_rope_head_dim) not in form.dims:
        held = " or ".join(f"{latent} and {rope}" for latent, rope in form.dims)
        raise ValueError(
            f"{form.name} holds latents and rope keys of {held}, got {kv_lora_rank} and {qk_rope_head_dim}"
        )
    return form.width


def cache_dtype(layout: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the cache tensor. Raises ValueError for an unknown layout, or for a model dtype that it cannot hold."""
    if require_layout(layout) == "auto":
        return model_dtype
    if layout == "fp8":
        return torch.float8_e4m3fn
    form = TILED_FORMATS[layout]
    if form.plain and model_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{form.name} holds plain values of bfloat16 or float16, got {model_dtype}")
    return torch.uint8


def encode(kv_c: Tensor, k_pe: Tensor, layout: str, k_scale: float, tile_scales: str = "float32") -> Tensor:
    """The entries [T, entry_width] of :func:`cache_dtype` of T tokens.

    kv_c: [T, L]. k_pe: [T, R], of the same dtype, the model's. k_scale: what an ``fp8`` code of 1.0 stands for; no
    other layout depends on it. tile_scales: one of :data:`TILE_SCALES`, of ``fp8_ds_mla``.
    """
    require_layout(layout)
    if kv_c.dim() != 2 or k_pe.dim() != 2 or kv_c.shape[0] != k_pe.shape[0]:
        raise ValueError(f"expected latents [T, L] and rope keys [T, R], got {list(kv_c.shape)} and {list(k_pe.shape)}")
    keys = torch.cat((kv_c, k_pe), dim=-1)
    if layout == "auto":
        return keys
    if layout == "fp8":
        return quantization.quantize_e4m3(keys, k_scale)
    entry_width(layout, kv_c.shape[1], k_pe.shape[1])
    cache_dtype(layout, keys.dtype)
    return _by_blocks(partial(_tiles_of, form=TILED_FORMATS[layout], tile_scales=tile_scales), keys)


def decode_rows(
    rows: Tensor,  # [S, entry_width] of :func:`cache_dtype`
    layout: str,
    k_scale: float,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rope_dtype: torch.dtype = torch.bfloat16,  # dtype of the plain values of a tiled entry
) -> tuple[Tensor, Tensor]:
    """What S entries mean to a kernel that reads them, in float64: (kv_c [S, L], k_pe [S, R])."""
    width = entry_width(layout, kv_lora_rank, qk_rope_head_dim)
    if rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(f"expected {layout} entries [S, {width}], got {list(rows.shape)}")
    if layout in TILED_FORMATS:
        cache_dtype(layout, rope_dtype)
        values = _by_blocks(partial(_keys_of, form=TILED_FORMATS[layout], plain_dtype=rope_dtype), rows)
    else:
        values = rows.to(torch.float64) if layout == "auto" else quantization.dequantize_e4m3(rows, k_scale)
    return values[:, :kv_lora_rank], values[:, kv_lora_rank : kv_lora_rank + qk_rope_head_dim]


def copy_blocks(caches: list[Tensor], src_to_dst: Tensor) -> None:
    """Copy whole blocks, [n, 2] numbers, within each cache [blocks, page, width]; all are read first."""
    for cache in caches:
        swap_blocks(cache, cache, src_to_dst)


def swap_blocks(src: Tensor, dst: Tensor, src_to_dst: Tensor) -> None:
    """Copy blocks of ``src`` into ``dst``, both [blocks, page, width] of one dtype, on any devices."""
    pairs = src_to_dst.long().cpu()
    source, target = src.view(torch.uint8), dst.view(torch.uint8)  # not every dtype can be indexed on every device
    target[pairs[:, 1].to(dst.device)] = source[pairs[:, 0].to(src.device)].to(dst.device)


def _tiles_of(keys: Tensor, form: TiledFormat, tile_scales: str) -> Tensor:
    """The entries of keys [T, L + R] of the model's dtype: [T, form.width] uint8."""
    tiles = keys[:, : form.coded].to(torch.float64).unflatten(-1, (form.tiles, form.tile))
    scales, stored = _scales(tiles.abs().amax(dim=-1) / _LARGEST[form.codes], form, tile_scales)
    plain = pad(keys[:, form.coded :], (0, form.coded + form.plain - keys.shape[-1]))
    quotients = (tiles / scales.unsqueeze(-1)).flatten(1)
    if form.codes == "e4m3":
        codes = quantization.quantize_e4m3(quotients, 1.0)
    else:
        low, high = quantization.quantize_e2m1(quotients).unflatten(-1, (-1, 2)).unbind(-1)
        codes = low | high << 4
    plain = quantization.quantize_e4m3(plain, 1.0) if form.plain_codes else plain
    parts = {"codes": codes, "scales": pad(stored, (0, form.padding)), "plain": plain}
    return torch.cat([parts[name].contiguous().view(torch.uint8) for name in form.order], dim=-1)


def steady(keys: Tensor, form: TiledFormat, tile_scales: str, slack: float) -> Tensor:
    """[T, tiles] bool: tiles of keys [T, L + R] whose scale is the same for values larger or smaller by ``slack``."""
    tiles = keys[:, : form.coded].to(torch.float64).unflatten(-1, (form.tiles, form.tile))
    least = tiles.abs().amax(dim=-1) / _LARGEST[form.codes]
    if form.scales == "float32" and tile_scales == "float32":
        return torch.ones_like(least, dtype=torch.bool)
    low, high = (_scales(least * (1 + side * slack), form, tile_scales)[0] for side in (-1, 1))
    return low == high


def _keys_of(rows: Tensor, form: TiledFormat, plain_dtype: torch.dtype) -> Tensor:
    parts = dict(zip(form.order, (part.contiguous() for part in rows.split(form.sizes, dim=-1)), strict=True))
    data = parts["scales"][:, : form.scale_bytes - form.padding].contiguous()
    if form.scales == "ue8m0":  # powers of two as bits of a float64, which are the same on every device
        powers = (data.to(torch.int64) + (1023 - _EXPONENT_BIAS)).bitwise_left_shift_(52).view(torch.float64)
        scales = powers.masked_fill(data == _NOT_A_NUMBER, torch.nan)
    else:
        scales = data.view(torch.float32 if form.scales == "float32" else torch.float8_e4m3fn).to(torch.float64)
    codes = parts["codes"]
    if form.codes == "e4m3":
        values = codes.view(torch.float8_e4m3fn).to(torch.float64)
    else:
        values = quantization.dequantize_e2m1(torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2))
    values = (values.unflatten(-1, (form.tiles, form.tile)) * scales.unsqueeze(-1)).flatten(1)
    if not form.plain:
        return values
    plain = parts["plain"].view(torch.float8_e4m3fn if form.plain_codes else plain_dtype)
    return torch.cat((values, plain.to(torch.float64)), dim=-1)


def _by_blocks(convert: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    blocks = rows.split(max(1, quantization.BLOCK_ELEMENTS[rows.device.type] // rows.shape[1]))
    return torch.cat([convert(block) for block in blocks])


def _scales(least: Tensor, form: TiledFormat, tile_scales: str) -> tuple[Tensor, Tensor]:
    """Scales of tiles that need at least ``least`` [T, tiles], in float64 and as they are stored."""
    if tile_scales not in TILE_SCALES:
        raise ValueError(f"unknown tile scales {tile_scales!r}; expected one of {', '.join(TILE_SCALES)}")
    if form.scales == "e4m3":
        code = quantization.quantize_e4m3(least, 1.0).to(torch.float64).clamp(min=_LEAST_E4M3).to(torch.float8_e4m3fn)
        return code.to(torch.float64), code
    exponent = quantization.next_exponent(least.clamp(min=form.least_scale))
    if form.scales == "ue8m0":
        return torch.exp2(exponent), (exponent + _EXPONENT_BIAS).to(torch.uint8)
    number = torch.exp2(exponent).to(torch.float32) if tile_scales == "pow2" else least.to(torch.float32)
    # A tile of zeros, or one so small that its scale is not representable, must not be divided by 0.
    number = torch.where(number == 0, 1.0, number)
    return number.to(torch.float64), number


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


def local_length(length: int, *, rank: int, world_size: int, interleave: int) -> int:
    cycle = interleave * world_size
    rest = length % cycle - rank * interleave
    return length // cycle * interleave + min(max(rest, 0), interleave)


def local_positions(length: int, *, rank: int, world_size: int, interleave: int) -> tuple[int, ...]:
    """The positions, ascending, of those of the first ``length`` tokens that ``rank`` holds."""
    count = local_length(length, rank=rank, world_size=world_size, interleave=interleave)
    return tuple((index // interleave * world_size + rank) * interleave + index % interleave for index in range(count))
