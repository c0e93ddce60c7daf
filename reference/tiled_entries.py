"""Entries whose columns are codes in tiles: what a writer stores of a key, and what a reader makes of it, in float64.

The forms stand in ``entry_formats``. A tile's scale is its largest magnitude over the largest code, in the form that
the format stores: a float32 number or the next power of two, which the caller chooses; an exponent, of the next power
of two; or the nearest e4m3 code.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mla_conformance.reference.entry_formats import TILE_SCALES, TiledFormat
from mla_conformance.reference.quantization import (
    E2M1_MAX,
    E4M3_MAX,
    dequantize_e2m1,
    quantize_e2m1,
    quantize_e4m3,
    require_float8,
)

_LEAST_SCALE = 1e-4
"""Of a power of two before it is rounded up, for tiles of zeros and small ones: 2^-13."""
_LEAST_E4M3 = 2.0**-9
_EXPONENT_BIAS, _NOT_A_NUMBER = 127, 255
_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX}


def encode_tiles(keys: Tensor, form: TiledFormat, tile_scales: str = "float32") -> Tensor:
    """The entries of keys [T, L + R] of the model's dtype: [T, form.width] uint8.

    tile_scales: one of :data:`TILE_SCALES`, of a form with float32 scales. Raises ValueError for another name, for keys
    wider than the form, or for a dtype other than 16 bits where plain values are stored.
    """
    require_float8()
    check_form(form, keys.shape[-1], keys.dtype)
    tiles = keys[:, : form.coded].to(torch.float64).unflatten(-1, (form.tiles, form.tile))
    scales, stored = _scales(tiles.abs().amax(dim=-1) / _LARGEST[form.codes], form.scales, tile_scales)
    codes = _packed(tiles / scales.unsqueeze(-1), form.codes)
    padded = torch.nn.functional.pad(stored, (0, form.padding))
    plain = torch.nn.functional.pad(keys[:, form.coded :], (0, form.coded + form.plain - keys.shape[-1]))
    parts = (codes, plain, padded) if form.scales_behind_page else (codes, padded, plain)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def decode_tiles(rows: Tensor, form: TiledFormat, plain_dtype: torch.dtype) -> Tensor:
    """What entries [S, form.width] mean: keys [S, coded + plain] float64.

    plain_dtype: the model's. Raises ValueError for one other than 16 bits where plain values are stored.
    """
    check_form(form, form.coded + form.plain, plain_dtype)
    behind = (form.plain_bytes, form.scale_bytes)
    codes, *rest = rows.split([form.code_bytes, *(behind if form.scales_behind_page else behind[::-1])], dim=-1)
    plain, stored = rest if form.scales_behind_page else rest[::-1]
    scales = _STORED[form.scales](stored[:, : form.scale_bytes - form.padding].contiguous())
    values = _unpacked(codes.contiguous(), form.codes).unflatten(-1, (form.tiles, form.tile)) * scales.unsqueeze(-1)
    if not form.plain:
        return values.flatten(1)
    return torch.cat((values.flatten(1), plain.contiguous().view(plain_dtype).to(torch.float64)), dim=-1)


def check_form(form: TiledFormat, width: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless keys so wide, of a model of this dtype, fit the form."""
    if not form.coded <= width <= form.coded + form.plain:
        raise ValueError(f"{form.name} holds {form.coded} to {form.coded + form.plain} columns of a key, got {width}")
    if form.plain and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{form.name} holds plain values of bfloat16 or float16, got {dtype}")


def _scales(least: Tensor, kind: str, tile_scales: str) -> tuple[Tensor, Tensor]:
    """Scales of tiles that need at least ``least`` [T, tiles], in float64 and as they are stored."""
    if tile_scales not in TILE_SCALES:
        raise ValueError(f"unknown tile scales {tile_scales!r}; expected one of {', '.join(TILE_SCALES)}")
    if kind == "e4m3":
        code = quantize_e4m3(least, 1.0).to(torch.float64).clamp(min=_LEAST_E4M3).to(torch.float8_e4m3fn)
        return code.to(torch.float64), code
    exponent = least.clamp(min=_LEAST_SCALE).log2().ceil()
    if kind == "ue8m0":
        return torch.exp2(exponent), (exponent + _EXPONENT_BIAS).to(torch.uint8)
    number = torch.exp2(exponent).to(torch.float32) if tile_scales == "pow2" else least.to(torch.float32)
    # A tile of zeros, or one so small that its scale is not representable, must not be divided by 0.
    number = torch.where(number == 0, 1.0, number)
    return number.to(torch.float64), number


def _exponents(data: Tensor) -> Tensor:
    """Powers of two of their biased exponents; all bits set is not a number."""
    powers = torch.exp2(data.to(torch.float64) - _EXPONENT_BIAS)
    return powers.masked_fill(data == _NOT_A_NUMBER, torch.nan)


_STORED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda data: data.view(torch.float32).to(torch.float64),
    "ue8m0": _exponents,
    "e4m3": lambda data: data.view(torch.float8_e4m3fn).to(torch.float64),
}


def _packed(quotients: Tensor, kind: str) -> Tensor:
    """[T, bytes] codes of quotients [T, tiles, tile]."""
    flat = quotients.flatten(1)
    if kind == "e4m3":
        return quantize_e4m3(flat, 1.0)
    low, high = quantize_e2m1(flat).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def _unpacked(codes: Tensor, kind: str) -> Tensor:
    """[S, coded] float64 of codes [S, bytes] uint8."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).to(torch.float64)
    return dequantize_e2m1(torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2))
