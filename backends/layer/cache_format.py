"""How a token's latents lie in a cache entry: plain, e4m3 with one scale, and DeepSeek's mixed 656 bytes.

``auto`` stores the values themselves, in the model's dtype; ``fp8`` the e4m3 code of value / scale, one scale for the
tensor; ``fp8_ds_mla`` 512 e4m3 codes of the latent, a float32 scale for each 128 of them, then 64 rotated values of 16
bits. A kernel of vLLM rounds here in float32; so does this module. The golden side is ``reference.cache_layout``.
"""

import torch

from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.latent_entries import dequantise
from mla_conformance.reference.quantization import E4M3_MAX

_LAYOUTS = ("auto", "fp8", "fp8_ds_mla")
_LATENT, _ROPE, _TILE = 512, 64, 128
_LEAST_SCALE = 1e-4
_TILES = _LATENT // _TILE
_ENTRY_BYTES = _LATENT + 4 * _TILES + 2 * _ROPE


def known_layout(kv_cache_dtype: str, tile_scales: str = "float32") -> str:
    """The layout of that name.

    Args:
        kv_cache_dtype: the name.
        tile_scales: what the scales of an ``fp8_ds_mla`` entry are when it is written, ``float32`` or ``pow2``.

    Raises:
        ValueError: there is none.
    """
    if tile_scales not in _TILE_SCALES:
        raise ValueError(f"expected tile scales of {', '.join(_TILE_SCALES)}, got {tile_scales!r}")
    layout = layout_of(kv_cache_dtype)
    if layout not in _LAYOUTS:
        raise ValueError(f"expected a cache dtype of {', '.join(_LAYOUTS)}, got {kv_cache_dtype!r}")
    return layout


def entry_width(kv_cache_dtype: str, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Elements of the cache's dtype that a token takes: L + R, or 656 bytes.

    Raises:
        ValueError: an unknown layout, or one without room for such latents.
    """
    if known_layout(kv_cache_dtype) != "fp8_ds_mla":
        return kv_lora_rank + qk_rope_head_dim
    if kv_lora_rank != _LATENT or qk_rope_head_dim not in (0, _ROPE):
        raise ValueError(
            f"an fp8_ds_mla entry holds L = {_LATENT} and R = {_ROPE} or 0, got L = {kv_lora_rank} and "
            f"R = {qk_rope_head_dim}; use the cache dtype auto or fp8"
        )
    return _ENTRY_BYTES


def cache_dtype(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the cache tensor.

    Raises:
        ValueError: an unknown layout, or one that does not store such a model.
    """
    layout = known_layout(kv_cache_dtype)
    if layout != "fp8_ds_mla":
        return model_dtype if layout == "auto" else torch.float8_e4m3fn
    if model_dtype.itemsize != 2:
        raise ValueError(
            f"an fp8_ds_mla entry stores the rope of a model of 16 bits, got {model_dtype}; use float16 or bfloat16"
        )
    return torch.uint8


def encode(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor, tile_scales: str = "float32"
) -> torch.Tensor:
    """[T, L] and [T, R] to entries [T, entry width] of the cache's dtype; see :func:`known_layout` for errors."""
    layout = known_layout(kv_cache_dtype, tile_scales)
    if layout == "auto":
        return torch.cat((kv_c, k_pe), dim=-1)
    if layout == "fp8":
        return _codes(torch.cat((kv_c, k_pe), dim=-1).float() / scale)
    tiles = kv_c.float().unflatten(-1, (_TILES, _TILE))
    scales = _TILE_SCALES[tile_scales](tiles.abs().amax(dim=-1, keepdim=True))
    rope = torch.nn.functional.pad(k_pe, (0, _ROPE - k_pe.shape[-1]))
    parts = (_codes(tiles / scales).flatten(-2), scales.squeeze(-1), rope.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def decode(entries: torch.Tensor, kv_cache_dtype: str, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """Entries [T, entry width] to latents [T, L + R] of the model's ``dtype``; see :func:`known_layout` for errors."""
    layout = known_layout(kv_cache_dtype)
    return (entries if layout == "auto" else dequantise(entries, layout, scale, dtype)).to(dtype)


def _float_scales(amax: torch.Tensor) -> torch.Tensor:
    """Scales of tiles with these largest magnitudes: a 448th of them, as SGLang writes them."""
    return torch.where(amax == 0, torch.ones_like(amax), amax / E4M3_MAX)


def _power_of_two_scales(amax: torch.Tensor) -> torch.Tensor:
    """The least power of two at which a tile fits, and at least 2^-13, as vLLM and FlashMLA write since 2026."""
    return torch.exp2((amax / E4M3_MAX).clamp(min=_LEAST_SCALE).log2().ceil())


_TILE_SCALES = {"float32": _float_scales, "pow2": _power_of_two_scales}


def _codes(quotient: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3, saturated: a cast alone makes NaN of what lies beyond 448."""
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
