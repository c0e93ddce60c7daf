"""Reading entries of the latent cache as a kernel does: codes times their scales, in float32."""

import torch

_CODES, _SCALES, _ROPE = 512, 16, 128
"""Bytes of the three parts of an ``fp8_ds_mla`` entry."""
_TILES = 4


def dequantise(rows: torch.Tensor, layout: str, k_scale: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
    """Keys [..., L + R] in float32; of an ``fp8_ds_mla`` entry always 512 + 64, zeros where a model has no rope.

    Args:
        rows: [..., width] entries of the cache's dtype.
        layout: ``auto``, ``fp8`` or ``fp8_ds_mla``.
        k_scale: float32 scalar, what a code of 1.0 in an ``fp8`` cache stands for.
        model_dtype: dtype of the rope values in an ``fp8_ds_mla`` entry.
    """
    if layout == "fp8_ds_mla":
        return _dequantise_tiles(rows, model_dtype)
    return rows.float() * k_scale if layout == "fp8" else rows.float()


def _dequantise_tiles(rows: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
    """Four tiles of codes, each with a float32 scale, then rope values."""
    codes, scales, rope = (part.contiguous() for part in torch.split(rows, [_CODES, _SCALES, _ROPE], dim=-1))
    tiles = codes.view(torch.float8_e4m3fn).float().reshape(*rows.shape[:-1], _TILES, _CODES // _TILES)
    latent = (tiles * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat((latent, rope.view(model_dtype).float()), dim=-1)
