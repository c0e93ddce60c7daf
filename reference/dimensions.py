"""The sizes of a head of MLA, and those of published models. Torch-free."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


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


class Preset(NamedTuple):
    head: MLADimensions
    kv_lora_rank: int  # L


_DEEPSEEK = Preset(MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128), 512)
_GLM = Preset(MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256), 512)
_SMALL = Preset(MLADimensions(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16), 32)
# By short name: those of DeepSeek-V2, -V3, -R1 and GLM-5, and one for tests.
PRESETS: Mapping[str, Preset] = {"v2": _DEEPSEEK, "v3": _DEEPSEEK, "r1": _DEEPSEEK, "glm": _GLM, "small": _SMALL}


def yarn_softmax_factor(factor: float, mscale_all_dim: float) -> float:
    """Factor of the softmax scale, by which DeepSeek's YaRN reaches the part that is not rotated as well."""
    return (0.1 * mscale_all_dim * math.log(factor) + 1.0) ** 2
