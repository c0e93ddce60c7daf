"""The selector: explicit, by priority, and errors that give every backend's reasons."""

from types import SimpleNamespace

import pytest
import torch

from mla_conformance.backends.interface import MLAPrefillSelectorConfig
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.registry import MLAPrefillBackendEnum
from mla_conformance.backends.selector import get_mla_prefill_backend, priorities, select_mla_prefill_backend
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
from mla_conformance.reference.dimensions import PRESETS

CPU = torch.device("cpu")
HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)
R1, GLM = PRESETS["r1"].head, PRESETS["glm"].head


def vllm_config(
    backend: MLAPrefillBackendEnum | None = None, dtype: torch.dtype = torch.bfloat16, preset: str = "r1"
) -> SimpleNamespace:
    """The attributes of a vLLM configuration that the selector reads."""
    model = SimpleNamespace(dtype=dtype, hf_text_config=PRESETS[preset].head)
    return SimpleNamespace(model_config=model, attention_config=SimpleNamespace(mla_prefill_backend=backend))


@pytest.mark.parametrize("preset", ["r1", "glm", "small"])
def test_a_cpu_selects_the_kernel_that_it_has(preset: str) -> None:
    assert get_mla_prefill_backend(vllm_config(preset=preset), CPU) is TorchSDPAPrefillBackend


def test_an_explicit_choice_is_taken() -> None:
    chosen = get_mla_prefill_backend(vllm_config(MLAPrefillBackendEnum.EAGER), CPU)
    assert chosen.get_name() == "EAGER"


def test_an_invalid_explicit_choice_gives_all_its_reasons_and_nobody_elses() -> None:
    config = MLAPrefillSelectorConfig(torch.float64, R1)
    with pytest.raises(ValueError, match="requested MLA prefill backend is not valid") as caught:
        select_mla_prefill_backend(HOPPER, config, MLAPrefillBackendEnum.TORCH_SDPA)
    assert "TORCH_SDPA: compute capability 9.0 not supported; dtype torch.float64 not supported" in str(caught.value)
    assert "FLASH" not in str(caught.value)


def test_custom_without_a_class_is_an_invalid_choice_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"CUSTOM: .*must be registered before use"):
        get_mla_prefill_backend(vllm_config(MLAPrefillBackendEnum.CUSTOM), CPU)


@pytest.mark.parametrize("capability", [None, HOPPER, BLACKWELL, DeviceCapability(12, 0)])
def test_without_a_valid_backend_every_candidate_gives_its_reason(capability: DeviceCapability | None) -> None:
    config = MLAPrefillSelectorConfig(torch.float64, R1)  # which no library's kernel takes
    with pytest.raises(ValueError, match="no valid MLA prefill backend for") as caught:
        select_mla_prefill_backend(capability, config)
    _, *lines = str(caught.value).splitlines()
    names, reasons = zip(*(line.strip().split(": ", maxsplit=1) for line in lines), strict=True)
    assert list(names) == [backend.name for backend in priorities(capability, R1)]
    assert all(reasons)


def test_priorities_follow_the_device_and_the_model() -> None:
    assert priorities(HOPPER, R1)[0].name == "FLASH_ATTN"
    assert "TRTLLM_RAGGED" not in [backend.name for backend in priorities(HOPPER, R1)]
    assert priorities(BLACKWELL, R1)[0].name == "FLASH_ATTN"
    assert priorities(BLACKWELL, GLM)[0].name == "TRTLLM_RAGGED"
    assert set(priorities(BLACKWELL, GLM)) == set(priorities(BLACKWELL, R1))
    assert priorities(HOPPER, GLM) == priorities(HOPPER, R1)
