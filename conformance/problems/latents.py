"""What the latents of a layer case are like: as a data regime makes keys, or with special tiles of an entry."""

from collections.abc import Callable, Mapping

import torch

from mla_conformance.cases.hazards import REGIMES

_TILE = 128
_TINY, _LARGE = 2.0**-20, 64.0

Latents = tuple[torch.Tensor, torch.Tensor]
"""kv_c [S, L] and k_pe [S, R] of one request."""


def shaped(kind: str, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Latents:
    """The latents of a request in the order of its tokens, made from N(0,1) ones.

    Args:
        kind: a name in ``cases.layer.LATENTS``.
        kv_c: [S, L].
        k_pe: [S, R].
    """
    if kind in _TRANSFORMS:
        return _TRANSFORMS[kind](kv_c), k_pe
    keys = REGIMES[kind].keys(torch.cat([kv_c, k_pe], dim=-1).unsqueeze(1))[:, 0]
    latent, rope = keys.tensor_split([kv_c.shape[1]], dim=-1)
    return REGIMES[kind].values(latent), rope


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
