"""Rotary position embedding (RoPE), in float64 and in both layouts of the pairs.

Source: Su et al., RoFormer, arXiv:2104.09864. How fast pairs turn is a value: `Rotation.plain` has RoFormer's powers of
a base, `Rotation.extended` those of YaRN, and a model with others writes them down.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

_NARROWEST_RAMP = 1e-3
"""Width of a ramp whose two ends are one number."""


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value of a model's configuration is an int or a float, no bool, and finite."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN: an extension of the context after training, in the terms of a model's configuration.

    Pairs that turn often over the original context keep their frequency, pairs that turn less than once are slowed down
    by the factor of the extension, and in between the share goes up with the number of the pair. Sources: Peng et al.,
    YaRN, arXiv:2309.00071, and the form that DeepSeek-V2 gave it, whose ramp runs over numbers of pairs, rounded
    outwards, and whose temperature is in part a softmax scale.

    factor: the extended context by the original one. original_positions: length of the original one in tokens.
    beta_fast, beta_slow: turns over the original context from which a pair keeps its frequency, and up to which it is
    slowed down by the whole factor. mscale, mscale_all_dim: 0 where the configuration has none.
    Raises ValueError for numbers out of range.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("factor", 1), ("original_positions", 1), ("mscale", 0), ("mscale_all_dim", 0)):
            if not (is_finite(getattr(self, name)) and getattr(self, name) >= least):
                raise ValueError(f"{name} of YaRN must be finite and at least {least}, got {getattr(self, name)!r}")
        if not (is_finite(self.beta_fast) and is_finite(self.beta_slow) and 0 < self.beta_slow <= self.beta_fast):
            raise ValueError(f"expected 0 < beta_slow <= beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}")

    def slowed(self, frequencies: Sequence[float], base: float) -> tuple[float, ...]:
        """What becomes of the frequencies of all pairs, powers of ``base``; ValueError for a base up to 1."""
        if not (is_finite(base) and base > 1):
            raise ValueError(f"expected a base of RoPE above 1, got {base!r}")
        dim = 2 * len(frequencies)
        fast, slow = (self._pair_of(turns, dim, base) for turns in (self.beta_fast, self.beta_slow))
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
        width = last - first or _NARROWEST_RAMP
        shares = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(len(frequencies))]
        return tuple(f / self.factor * share + f * (1 - share) for f, share in zip(frequencies, shares, strict=True))

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys: the temperature's root, or what DeepSeek leaves of it to them."""
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor of the softmax scale, by which DeepSeek reaches the part that is not rotated as well."""
        return self._temperature(self.mscale_all_dim) ** 2

    def _pair_of(self, turns: float, dim: int, base: float) -> float:
        """The pair, in fractions, that turns so often over the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """How the pairs of a rotary part turn with the position.

    frequencies: radians a token, one for each of the R/2 pairs. interleaved: True pairs elements (2i, 2i+1), as
    DeepSeek does; False pairs (i, i + R/2), the NeoX style. magnitude: factor of what was rotated, 1 but for YaRN.
    Raises ValueError for frequencies or a magnitude that are not finite numbers above 0.
    """

    frequencies: tuple[float, ...]
    interleaved: bool
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        for name, numbers in (("frequencies", self.frequencies), ("magnitude", (self.magnitude,))):
            if not all(is_finite(number) and number > 0 for number in numbers):
                raise ValueError(f"{name} of a rotation must be finite and above 0, got {getattr(self, name)!r}")

    @staticmethod
    def plain(dim: int, *, base: float = 10000.0, interleaved: bool) -> "Rotation":
        """Pair i of the R = ``dim`` elements turns by base^(-2i/R) radians a token; ValueError for an odd ``dim``."""
        return Rotation(frequencies=plain_frequencies(dim, base), interleaved=interleaved)

    @staticmethod
    def extended(yarn: Yarn, dim: int, *, base: float = 10000.0, interleaved: bool) -> "Rotation":
        """The same for a context that YaRN extends; ValueError for a ``base`` up to 1 as well."""
        slowed = yarn.slowed(plain_frequencies(dim, base), base)
        return Rotation(frequencies=slowed, interleaved=interleaved, magnitude=yarn.magnitude)

    @property
    def dim(self) -> int:
        """R, the elements that it rotates."""
        return 2 * len(self.frequencies)

    def table(self, positions: Tensor) -> Tensor:
        """[n, R] float64 for positions [n]: the cosines of the R/2 pairs times the magnitude, then their sines."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
        angle = positions.to(torch.float64)[:, None] * frequencies
        return self.magnitude * torch.cat((angle.cos(), angle.sin()), dim=-1)


def plain_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """base^(-2i/dim) for each of the dim/2 pairs i, radians a token; ValueError for an odd ``dim`` or a base <= 0."""
    if dim < 0 or dim % 2 or not (is_finite(base) and base > 0):
        raise ValueError(
            f"RoPE rotates pairs: expected an even number of elements and a base > 0, got {dim} and {base}"
        )
    exponent = torch.arange(0, dim, 2, dtype=torch.float64) / max(dim, 1)
    return tuple(torch.pow(base, -exponent).tolist())


def rope(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pair i of every row t by the angle positions[t] * frequencies[i].

    x: [T, ..., R], any float dtype; an R of 0 is legal. positions: [T], integers, in tokens.
    Returns [T, ..., R] float64. Raises ValueError for another R than the rotation's, or positions that do not match x.
    """
    if x.shape[-1] != rotation.dim:
        raise ValueError(f"expected a last dimension of {rotation.dim}, two for each frequency, got {tuple(x.shape)}")
    if positions.shape != x.shape[:1]:
        raise ValueError(f"expected one position a token, shape [{x.shape[0]}], got {tuple(positions.shape)}")
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
    """The inverse of `split_pairs`."""
    if interleaved:
        return torch.stack((first, second), dim=-1).flatten(-2)
    return torch.cat((first, second), dim=-1)
