"""The sizes of an MLA layer, those of the published models, and YaRN, by which contexts are extended. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MLADimensions:
    """Sizes of one attention head, in elements."""

    qk_nope_head_dim: int  # P, the part of query and key that carries no position
    qk_rope_head_dim: int  # R, the part that RoPE rotates; 0 for a model without it (NoPE), otherwise even
    v_head_dim: int  # V

    def __post_init__(self) -> None:
        for name in ("qk_nope_head_dim", "v_head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}; give the size in elements")
        rope = self.qk_rope_head_dim
        if type(rope) is not int or rope < 0 or rope % 2:
            raise ValueError(
                f"qk_rope_head_dim must be an even int >= 0, got {rope!r}; RoPE rotates pairs, and 0 means NoPE"
            )

    @property
    def qk_head_dim(self) -> int:
        """P + R, the width of a query and of an up-projected key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """Sizes of one MLA layer: H, N, Lq, L and those of a head."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None  # Lq; None where queries are projected from the hidden state itself, without a latent
    kv_lora_rank: int
    head: MLADimensions


_DEEPSEEK_HEAD = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_GLM_HEAD = MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
_SMALL_HEAD = MLADimensions(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)

_V2 = ModelDimensions(hidden_size=5120, num_heads=128, q_lora_rank=1536, kv_lora_rank=512, head=_DEEPSEEK_HEAD)
_V3 = ModelDimensions(hidden_size=7168, num_heads=128, q_lora_rank=1536, kv_lora_rank=512, head=_DEEPSEEK_HEAD)
_GLM = ModelDimensions(hidden_size=6144, num_heads=64, q_lora_rank=2048, kv_lora_rank=512, head=_GLM_HEAD)
_SMALL = ModelDimensions(hidden_size=64, num_heads=4, q_lora_rank=24, kv_lora_rank=32, head=_SMALL_HEAD)

# Layers by short name, before any split over ranks: of DeepSeek-V2, -V3, -R1 and GLM-5, and one for tests.
PRESETS: Mapping[str, ModelDimensions] = {"v2": _V2, "v3": _V3, "r1": _V3, "glm": _GLM, "small": _SMALL}
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

    def slowed(self, frequencies: Sequence[float], base: float) -> tuple[float, ...]:
        """What becomes of the frequencies of all pairs, powers of ``base``: those that turn often keep theirs."""
        dim = 2 * len(frequencies)
        fast, slow = (  # The pair, in fractions, that turns so often over the original context
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
