"""The interface: validation, quantisation keys and declarations."""

from typing import ClassVar

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, LseClass, Rounding, declaration_of
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.interface import MLADimensions, MLAPrefillBackend, MLAPrefillSelectorConfig
from mla_conformance.backends.platform import DeviceCapability, describe_device, get_device_capability
from mla_conformance.backends.quant_key import PER_TENSOR, QuantKey, ScaleDesc, fp8_static_tensor_sym
from mla_conformance.backends.torch_sdpa import TorchSDPAPrefillBackend
from mla_conformance.reference.dimensions import PRESETS

R1, GLM = PRESETS["r1"].head, PRESETS["glm"].head


class Picky(EagerPrefillBackend):
    """Rejects everything that can be rejected."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [R1]

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        return False

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        return ["pip install picky"]


def test_reasons_come_in_the_order_of_vllm() -> None:
    config = MLAPrefillSelectorConfig(torch.float16, GLM)
    capability, dtype, missing, dimensions = Picky.validate_configuration(DeviceCapability(8, 0), config)
    assert capability == "compute capability 8.0 not supported"
    assert dtype == "dtype torch.float16 not supported"
    assert missing == "required dependencies not available: pip install picky"
    assert dimensions.startswith(f"MLA dimensions {GLM} not supported (supported: {R1})")


def test_what_is_supported_has_no_reasons() -> None:
    config = MLAPrefillSelectorConfig(torch.bfloat16, GLM)
    assert EagerPrefillBackend.validate_configuration(None, config) == []
    assert TorchSDPAPrefillBackend.validate_configuration(None, config) == []


def test_a_selector_config_is_a_key() -> None:
    same = [MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(**vars(R1))) for _ in range(2)]
    assert len({*same, MLAPrefillSelectorConfig(torch.bfloat16, GLM)}) == 2


def test_the_interface_alone_is_no_backend() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MLAPrefillBackend(4, 1.0, 512, 128, 64, 128, None)  # type: ignore[abstract]


def test_quant_keys_are_values() -> None:
    key = fp8_static_tensor_sym()
    assert key == QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, PER_TENSOR)) and len({key, key}) == 1
    assert key != QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, False, PER_TENSOR))
    assert key != QuantKey(torch.float8_e5m2, key.scale)


def test_fused_output_is_declared_per_key() -> None:
    dims = (4, 1.0, 512, 128, 64, 128, None)
    key = fp8_static_tensor_sym()
    assert EagerPrefillBackend(*dims).supports_quant_output(key)
    assert not EagerPrefillBackend(*dims).supports_quant_output(QuantKey(torch.int8, key.scale))
    assert not TorchSDPAPrefillBackend(*dims).supports_quant_output(key)


def test_a_class_that_declares_nothing_is_held_to_the_strictest_rounding() -> None:
    assert declaration_of(object) == Declaration(rounding=Rounding(lse=LseClass.EXACT))


def test_a_declaration_of_another_type_is_refused() -> None:
    wrong = type("Wrong", (), {"declaration": {"emulated": True}})
    with pytest.raises(TypeError, match=r"Wrong\.declaration must be a Declaration, got dict"):
        declaration_of(wrong)


def test_an_emulation_says_so() -> None:
    assert declaration_of(EagerPrefillBackend).emulated
    assert not declaration_of(TorchSDPAPrefillBackend).emulated


def test_a_cpu_has_no_compute_capability() -> None:
    assert get_device_capability(torch.device("cpu")) is None
    assert describe_device(torch.device("cpu")) == "cpu"
    assert str(DeviceCapability(9, 0)) == "9.0"
