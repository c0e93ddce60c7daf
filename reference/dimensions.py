"""The sizes of an MLA layer, and those of the published models. Torch-free."""

import math
from collections.abc import Mapping
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


def yarn_softmax_factor(factor: float, mscale_all_dim: float) -> float:
    """Factor of the softmax scale, by which DeepSeek's YaRN reaches the part that is not rotated as well."""
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2
