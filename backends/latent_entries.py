"""Reading entries of the latent cache as a kernel does: gathered by slot, codes times their scales, in float32."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mla_conformance.reference.entry_formats import TILED_FORMATS

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a 4-bit code mean; the highest is the sign."""
_MANTISSA_BITS = 23


def gather(cache: Tensor, slots: Tensor, layout: str) -> Tensor:
    """Entries [..., width] of a cache [blocks, page, width] by their slots [...], the parts of an entry joined."""
    page, data = cache.shape[1], cache.view(torch.uint8)
    if layout not in TILED_FORMATS:
        # As bytes, since float8 cannot be indexed everywhere.
        return data[slots // page, slots % page].view(cache.dtype)
    pages, start, parts = data.flatten(1), 0, []
    for width in TILED_FORMATS[layout].parts:
        part = pages[:, start : start + page * width].unflatten(1, (page, width))
        parts.append(part[slots // page, slots % page])
        start += page * width
    return torch.cat(parts, dim=-1)


def dequantise(rows: Tensor, layout: str, k_scale: Tensor, model_dtype: torch.dtype) -> Tensor:
    """Keys [..., L + R] in float32; of a tiled entry all of its columns, zeros where a model has no rope.

    Args:
        rows: [..., width] entries of the cache's dtype.
        layout: ``auto``, ``fp8`` or the name of a tiled format.
        k_scale: float32 scalar, what a code of 1.0 in an ``fp8`` cache stands for.
        model_dtype: dtype of the plain values in a tiled entry.
    """
    if layout not in TILED_FORMATS:
        return rows.float() * k_scale if layout == "fp8" else rows.float()
    form = TILED_FORMATS[layout]  # tiles of codes, each with its scale, then plain values
    parts = dict(zip(form.order, (part.contiguous() for part in rows.split(form.sizes, dim=-1)), strict=True))
    tiles = _CODES[form.codes](parts["codes"]).unflatten(-1, (form.tiles, form.tile))
    scaled = (tiles * _SCALES[form.scales](parts["scales"])[..., : form.tiles].unsqueeze(-1)).flatten(-2)
    if not form.plain:
        return scaled
    plain = parts["plain"].view(torch.float8_e4m3fn if form.plain_codes else model_dtype)
    return torch.cat((scaled, plain.float()), dim=-1)


def _e4m3(data: Tensor) -> Tensor:
    return data.view(torch.float8_e4m3fn).float()


def _e2m1(data: Tensor) -> Tensor:
    """Two codes of a byte, the lower four bits first."""
    codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor(_E2M1, device=data.device)[codes & 7]
    return torch.where(codes >= 8, -values, values)


_CODES: Mapping[str, Callable[[Tensor], Tensor]] = {"e4m3": _e4m3, "e2m1": _e2m1}
_SCALES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda data: data.view(torch.float32),
    "ue8m0": lambda data: (data.int() << _MANTISSA_BITS).view(torch.float32),  # the exponent of a float32 number
    "e4m3": _e4m3,
}
