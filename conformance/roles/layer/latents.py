"""What the latents of a layer case are like: as a data regime makes keys, or with special tiles of an entry."""

from collections.abc import Callable, Mapping

import torch

from mla_conformance.problems.cache_bytes import TIE_SLACK
from mla_conformance.problems.regimes import REGIMES
from mla_conformance.reference.cache_layout import encode
from mla_conformance.roles.layer.case import LayerCase

_TILE, _TILES = 128, slice(512, 528)
_LEAST_EXPONENT, _MANTISSA_BITS = -6, 3
_ASIDE = 1 - 2.0**-6
_TINY, _LARGE = 2.0**-20, 64.0

Latents = tuple[torch.Tensor, torch.Tensor]
"""kv_c [S, L] and k_pe [S, R] of one request."""


def shaped(kind: str, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Latents:
    """The latents of a request in the order of its tokens, made from N(0,1) ones.

    Args:
        kind: a name in ``roles.layer.case.LATENTS``.
        kv_c: [S, L].
        k_pe: [S, R].
    """
    if kind in _TRANSFORMS:
        return _TRANSFORMS[kind](kv_c), k_pe
    keys = REGIMES[kind].keys(torch.cat([kv_c, k_pe], dim=-1).unsqueeze(1))[:, 0]
    latent, rope = keys.tensor_split([kv_c.shape[1]], dim=-1)
    return REGIMES[kind].values(latent), rope


def away_from_ties(case: LayerCase, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Latents:
    """The latents of a cache of codes without those that two codes are equally near to.

    There a layer that rounds its scales or quotients otherwise writes the other code, rightly (SPEC 6.7), and decodes
    another value. Quotients of 8-bit numbers are ties far more often than chance would have it.
    """
    if case.cache == "fp8":
        scale = torch.tensor(case.cache_scale, dtype=torch.float32).double()
        return _aside(kv_c, scale), _aside(k_pe, scale)
    if case.cache == "fp8_ds_mla":
        entries = encode(kv_c, k_pe, case.cache, case.cache_scale, case.scales)
        scales = entries[:, _TILES].contiguous().view(torch.float32).double()
        return _aside(kv_c, scales.repeat_interleave(_TILE, dim=1)), k_pe
    return kv_c, k_pe


def _aside(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x`` with what lies at the middle between two e4m3 codes of x / scale moved towards 0, so no scale grows."""
    quotient = (x.double() / scale).abs()
    _, exponent = torch.frexp(quotient)
    step = torch.exp2((exponent - 1).clamp(min=_LEAST_EXPONENT).double() - _MANTISSA_BITS)
    off = ((quotient / step).frac() - 0.5).abs() * step
    return torch.where(off <= 4 * TIE_SLACK * quotient, x * _ASIDE, x).to(x.dtype)


def _one_tile_times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One tile of each latent, another one for the next token."""

    def scaled(kv_c: torch.Tensor) -> torch.Tensor:
        tile = torch.arange(kv_c.shape[1]) // _TILE
        chosen = tile == torch.arange(len(kv_c)).unsqueeze(1) % (int(tile[-1]) + 1)
        return torch.where(chosen, kv_c * factor, kv_c)

    return scaled


_TRANSFORMS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "large": lambda kv_c: kv_c * _LARGE,
    "tiny_tiles": _one_tile_times(_TINY),
    "zero_tiles": _one_tile_times(0.0),
}
