"""YaRN (arXiv:2309.00071, as DeepSeek-V2 has it): frequencies and temperature of an extended context. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NARROWEST_RAMP = 1e-3  # width of a ramp whose two ends are one number


@dataclass(frozen=True, kw_only=True)
class Yarn:
    factor: float  # the extended context by the original one
    original_positions: int  # length of the original one in tokens
    beta_fast: float = 32.0  # turns over the original context from which a pair keeps its frequency
    beta_slow: float = 1.0  # and up to which it is slowed down by the whole factor
    mscale: float = 0.0  # 0 where the configuration has none, as the next
    mscale_all_dim: float = 0.0

    def slowed(self, frequencies: Sequence[float], base: float) -> tuple[float, ...]:
        """What becomes of the frequencies of all pairs, powers of ``base``: those that turn often keep theirs."""
        dim = 2 * len(frequencies)
        # The pair, in fractions, that turns so often over the original context.
        fast, slow = (
            dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
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

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0
