"""How a token's latents lie in a cache entry: plain, e4m3 with one scale, and DeepSeek's mixed 656 bytes.

A kernel of vLLM rounds here in float32; so does this module. The golden side is ``reference.cache_layout``.
"""

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import ClassVar

import torch

from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.reference.entry_formats import TILE_SCALES
from mla_conformance.reference.quantization import E4M3_MAX

_LATENT, _ROPE, _TILE = 512, 64, 128
_LEAST_SCALE = 1e-4
_TILES = _LATENT // _TILE
_ENTRY_BYTES = _LATENT + 4 * _TILES + 2 * _ROPE


class CacheFormat(ABC):
    """One layout of a token's entry.

    Attributes:
        name: as a configuration spells it.
    """

    name: ClassVar[str]

    @abstractmethod
    def entry_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Elements of the cache's dtype that a token takes.

        Raises:
            ValueError: the layout has no room for such latents.
        """

    @abstractmethod
    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of the cache tensor.

        Raises:
            ValueError: the layout does not store such a model.
        """

    @abstractmethod
    def encode(self, kv_c: torch.Tensor, k_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[T, L] and [T, R] to entries [T, entry width] of the cache's dtype."""

    @abstractmethod
    def decode(self, entries: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
        """Entries [T, entry width] to latents [T, L + R] of the model's ``dtype``."""


class PlainFormat(CacheFormat):
    """The values themselves, in the model's dtype."""

    name = "auto"

    def entry_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """L + R."""
        return kv_lora_rank + qk_rope_head_dim

    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The model's."""
        return model_dtype

    def encode(self, kv_c: torch.Tensor, k_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The latent, then the rotated key."""
        return torch.cat((kv_c, k_pe), dim=-1)

    def decode(self, entries: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
        """The entries as they are."""
        return entries.to(dtype)


class Float8Format(CacheFormat):
    """The e4m3 code of value / scale, one scale for the tensor."""

    name = "fp8"

    def entry_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """L + R."""
        return kv_lora_rank + qk_rope_head_dim

    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """e4m3."""
        return torch.float8_e4m3fn

    def encode(self, kv_c: torch.Tensor, k_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Codes of the latent, then of the rotated key."""
        return _codes(torch.cat((kv_c, k_pe), dim=-1).float() / scale)

    def decode(self, entries: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
        """Code · scale."""
        return (entries.float() * scale).to(dtype)


class DeepSeekFormat(CacheFormat):
    """512 e4m3 codes of the latent, a float32 scale for each 128 of them, then 64 rotated values of 16 bits."""

    name = "fp8_ds_mla"

    def entry_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """656 bytes; ValueError for other latents than 512 with a rope of 64 or none."""
        if kv_lora_rank != _LATENT or qk_rope_head_dim not in (0, _ROPE):
            raise ValueError(
                f"an fp8_ds_mla entry holds L = {_LATENT} and R = {_ROPE} or 0, got L = {kv_lora_rank} and "
                f"R = {qk_rope_head_dim}; use the cache dtype auto or fp8"
            )
        return _ENTRY_BYTES

    def cache_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Bytes; ValueError for a model that does not have 16 bits."""
        if model_dtype.itemsize != 2:
            raise ValueError(
                f"an fp8_ds_mla entry stores the rope of a model of 16 bits, got {model_dtype}; use float16 or bfloat16"
            )
        return torch.uint8

    def encode(self, kv_c: torch.Tensor, k_pe: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Bytes of the codes, of the tiles' scales and of the rotated key."""
        tiles = kv_c.float().unflatten(-1, (_TILES, _TILE))
        amax = tiles.abs().amax(dim=-1, keepdim=True)
        scales = self.tile_scales(amax)
        rope = torch.nn.functional.pad(k_pe, (0, _ROPE - k_pe.shape[-1]))
        parts = (_codes(tiles / scales).flatten(-2), scales.squeeze(-1), rope.contiguous())
        return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)

    def tile_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Float32 scales of tiles with these largest magnitudes: a 448th of them."""
        return torch.where(amax == 0, torch.ones_like(amax), amax / E4M3_MAX)

    def decode(self, entries: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
        """Code · its tile's scale, then the rotated key as it is."""
        codes, scales, rope = entries.split((_LATENT, 4 * _TILES, 2 * _ROPE), dim=-1)
        tiles = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (_TILES, _TILE))
        latent = tiles * scales.contiguous().view(torch.float32).unsqueeze(-1)
        return torch.cat((latent.flatten(-2).to(dtype), rope.contiguous().view(dtype)), dim=-1)


class PowerOfTwoFormat(DeepSeekFormat):
    """The same with powers of two for scales, as vLLM and FlashMLA write them since 2026."""

    def tile_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """The least power of two at which a tile fits, and at least 2^-13."""
        return torch.exp2((amax / E4M3_MAX).clamp(min=_LEAST_SCALE).log2().ceil())


def _codes(quotient: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3, saturated: a cast alone makes NaN of what lies beyond 448."""
    return quotient.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


CACHE_FORMATS = MappingProxyType({f.name: f for f in (PlainFormat(), Float8Format(), DeepSeekFormat())})
"""The layouts by name."""
_POWER_OF_TWO = PowerOfTwoFormat()


def cache_format(kv_cache_dtype: str, tile_scales: str = "float32") -> CacheFormat:
    """The layout of that name.

    Args:
        kv_cache_dtype: the name.
        tile_scales: what the scales of an ``fp8_ds_mla`` entry are when it is written, ``float32`` or ``pow2``.

    Raises:
        ValueError: there is none.
    """
    if tile_scales not in TILE_SCALES:
        raise ValueError(f"expected tile scales of {', '.join(TILE_SCALES)}, got {tile_scales!r}")
    layout = layout_of(kv_cache_dtype)
    if layout not in CACHE_FORMATS:
        raise ValueError(f"expected a cache dtype of {', '.join(CACHE_FORMATS)}, got {kv_cache_dtype!r}")
    return _POWER_OF_TWO if layout == _POWER_OF_TWO.name and tile_scales == "pow2" else CACHE_FORMATS[layout]
