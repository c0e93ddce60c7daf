"""Rotary position embedding (RoPE, arXiv:2104.09864), in float64 and in both layouts of the pairs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.dimensions import Yarn


@dataclass(frozen=True, kw_only=True)
class Rotation:
    frequencies: tuple[float, ...]  # radians a token, one for each of the R/2 pairs
    interleaved: bool  # True pairs elements (2i, 2i+1), as DeepSeek does; False pairs (i, i + R/2), the NeoX style
    magnitude: float = 1.0  # factor of what was rotated, 1 but for YaRN

    @staticmethod
    def plain(dim: int, *, base: float = 10000.0, interleaved: bool) -> "Rotation":
        """Pair i of the R = ``dim`` elements turns by base^(-2i/R) radians a token."""
        return Rotation(frequencies=plain_frequencies(dim, base), interleaved=interleaved)

    @staticmethod
    def extended(yarn: Yarn, dim: int, *, base: float = 10000.0, interleaved: bool) -> "Rotation":
        slowed = yarn.slowed(plain_frequencies(dim, base), base)
        return Rotation(frequencies=slowed, interleaved=interleaved, magnitude=yarn.magnitude)

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies)

    def table(self, positions: Tensor) -> Tensor:
        """[n, R] float64 for positions [n]: the cosines of the R/2 pairs times the magnitude, then their sines."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angle = positions.to(torch.float64)[:, None] * frequencies
        return self.magnitude * torch.cat((angle.cos(), angle.sin()), dim=-1)


def plain_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """base^(-2i/dim) for each of the dim/2 pairs i, radians a token."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / max(dim, 1)
    return tuple(torch.pow(base, -exponent).tolist())


def rope(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """[T, ..., R] float64: pair i of every row t of x turned by the angle positions[t] * frequencies[i]."""
    table = rotation.table(positions).reshape(x.shape[0], *[1] * (x.dim() - 2), rotation.dim)
    cos, sin = table.tensor_split(2, dim=-1)
    first, second = split_pairs(x.to(torch.float64), rotation.interleaved)
    return join_pairs(first * cos - second * sin, second * cos + first * sin, rotation.interleaved)


def split_pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second element of every pair, each [..., R/2]."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def join_pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
