"""YaRN, by which a model's frequencies follow from its configuration."""

import math
from dataclasses import dataclass

from mla_conformance.reference.dimensions import yarn_softmax_factor
from mla_conformance.reference.projections import Rotation, plain_frequencies

_NARROWEST_RAMP = 1e-3  # width of a ramp whose two ends are one number


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Frequencies and temperature of an extended context (arXiv:2309.00071, as DeepSeek-V2 has it)."""

    factor: float  # the extended context by the original one
    original_positions: int  # length of the original one in tokens
    beta_fast: float = 32.0  # turns over the original context from which a pair keeps its frequency
    beta_slow: float = 1.0  # and up to which it is slowed down by the whole factor
    mscale: float = 0.0  # 0 where the configuration has none, as the next
    mscale_all_dim: float = 0.0

    def rotation(self, dim: int, *, base: float = 10000.0, interleaved: bool) -> Rotation:
        """Pairs that turn often over the original context keep their frequency, a power of ``base``."""
        fast, slow = (  # The pair, in fractions, that turns so often over the original context
            dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
        width = last - first or _NARROWEST_RAMP
        shares = [min(max((pair - first) / width, 0.0), 1.0) for pair in range(dim // 2)]
        plain = plain_frequencies(dim, base)
        slowed = tuple(f / self.factor * share + f * (1 - share) for f, share in zip(plain, shares, strict=True))
        return Rotation(frequencies=slowed, interleaved=interleaved, magnitude=self.magnitude)

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys: the temperature's root, or what DeepSeek leaves of it to them."""
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def softmax_factor(self) -> float:
        return yarn_softmax_factor(self.factor, self.mscale_all_dim)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
