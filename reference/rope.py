"""Rotary position embedding (RoPE), in float64 and in both layouts of the pairs.

Source: Su et al., RoFormer, arXiv:2104.09864. Context-extension scalings of the frequencies (YaRN and others) are
outside: they reach an attention kernel only as different inputs and another softmax scale.
"""

import torch
from torch import Tensor


def rope(x: Tensor, positions: Tensor, *, base: float = 10000.0, interleaved: bool) -> Tensor:
    """Rotate pair i of every row t by the angle positions[t] * base^(-2i/R).

    x: [T, ..., R], any float dtype, R even (0 is legal and changes nothing). positions: [T], integers, in tokens.
    interleaved: True pairs elements (2i, 2i+1), as DeepSeek and GLM do; False pairs (i, i + R/2), the NeoX style.
    Returns [T, ..., R] float64. Raises ValueError for an odd R or positions that do not match x.
    """
    dim = x.shape[-1]
    if dim % 2:
        raise ValueError(f"RoPE rotates pairs: expected an even last dimension, got {dim} in shape {tuple(x.shape)}")
    if positions.shape != x.shape[:1]:
        raise ValueError(f"expected one position a token, shape [{x.shape[0]}], got {tuple(positions.shape)}")
    angle = _angles(positions, dim, base).reshape(x.shape[0], *[1] * (x.dim() - 2), dim // 2)
    cos, sin = angle.cos(), angle.sin()
    first, second = _split_pairs(x.to(torch.float64), interleaved)
    return _join_pairs(first * cos - second * sin, second * cos + first * sin, interleaved)


def _angles(positions: Tensor, dim: int, base: float) -> Tensor:
    """Angles in radians, [T, R/2] float64."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / max(dim, 1)
    return positions.to(torch.float64)[:, None] * torch.pow(base, -exponent)


def _split_pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second element of every pair, each [..., R/2]."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join_pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `_split_pairs`."""
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
