"""Sizes: their ranges, the published ones, and that they cost no torch."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from mla_conformance.reference.dimensions import PRESETS, MLADimensions, ModelDimensions

SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def test_heads() -> None:
    head = MLADimensions(**SIZES)
    assert head.qk_head_dim == 192 and MLADimensions(**(SIZES | {"qk_rope_head_dim": 0})).qk_head_dim == 128
    with pytest.raises(FrozenInstanceError):
        head.v_head_dim = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [-2, 1.5, True, "64"])
def test_sizes_are_positive_ints(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
        MLADimensions(**(SIZES | {name: value}))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="even"):
        MLADimensions(**(SIZES | {"qk_rope_head_dim": 63}))
    with pytest.raises(ValueError, match="v_head_dim must be a positive int, got 0"):
        MLADimensions(**(SIZES | {"v_head_dim": 0}))
    with pytest.raises(ValueError, match="num_heads"):
        ModelDimensions(hidden_size=1, num_heads=0, q_lora_rank=1, kv_lora_rank=1, head=MLADimensions(**SIZES))


def test_presets() -> None:
    assert set(PRESETS) == {"v2", "v3", "r1", "glm", "small"}
    assert PRESETS["r1"] == PRESETS["v3"]
    assert PRESETS["glm"].head == MLADimensions(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
    with pytest.raises(TypeError):
        PRESETS["v4"] = PRESETS["v3"]  # type: ignore[index]


def test_sizes_plans_and_golden_files_need_no_torch() -> None:
    modules = "mla_conformance.reference.dimensions, mla_conformance.reference.chunking, mla_conformance.fixtures"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
