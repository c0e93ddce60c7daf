"""The interface: validation, quantisation keys and declarations."""

from typing import ClassVar

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, LseClass, Rounding, declaration_of
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.interface import MLADimensions, MLAPrefillBackend, MLAPrefillSelectorConfig
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import QuantKey, fp8_static_tensor_sym
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


def test_the_interface_alone_is_no_backend() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MLAPrefillBackend(4, 1.0, 512, 128, 64, 128, None)  # type: ignore[abstract]


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
