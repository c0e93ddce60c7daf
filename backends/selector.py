"""Choice of the MLA prefill backend: explicit, or by priority for the device (vLLM's ``selector``)."""

from typing import Any

import torch

from mla_conformance.backends import interface, kernel
from mla_conformance.backends.registry import MLAPrefillBackendEnum
from mla_conformance.reference.dimensions import PRESETS, MLADimensions


def priorities(
    device_capability: kernel.DeviceCapability | None, mla_dimensions: MLADimensions
) -> tuple[MLAPrefillBackendEnum, ...]:
    """Backends in the order in which they are tried on a device."""
    known = MLAPrefillBackendEnum
    if device_capability is None:
        return (known.TORCH_SDPA,)
    if device_capability.major != 10:
        return known.FLASH_ATTN, known.FLASHINFER, known.CUDNN
    first = (known.FLASH_ATTN, known.TRTLLM_RAGGED)
    first = first[::-1] if mla_dimensions == PRESETS["glm"].head else first
    return *first, known.FLASHINFER, known.CUDNN, known.TOKENSPEED_MLA


def select_mla_prefill_backend(
    device_capability: kernel.DeviceCapability | None,
    selector_config: interface.MLAPrefillSelectorConfig,
    explicit: MLAPrefillBackendEnum | None = None,
) -> type[interface.MLAPrefillBackend]:
    """``explicit`` if given, else the first valid one by priority; ValueError, with every reason, if none is."""
    candidates = (explicit,) if explicit else priorities(device_capability, selector_config.mla_dimensions)
    asked = "the requested MLA prefill backend is not valid" if explicit else "no valid MLA prefill backend"
    rejected = f"{asked} for {selector_config}:"
    for backend in candidates:
        try:
            loaded = backend.get_class()
            found = loaded.resolve(device_capability) if hasattr(loaded, "resolve") else loaded
        except (ImportError, ValueError) as error:
            reasons = [str(error)]
        else:
            reasons = found.validate_configuration(device_capability, selector_config)
            reasons = reasons or getattr(found, "broken_dependencies", list)()
            if not reasons:
                return found
        rejected += f"\n  {backend.name}: {'; '.join(reasons)}"
    raise ValueError(rejected)


def get_mla_prefill_backend(vllm_config: Any, device: torch.device | None = None) -> type[interface.MLAPrefillBackend]:
    """The backend that a vLLM configuration selects, by default for the current CUDA device, or the CPU."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = vllm_config.model_config
    dimensions = MLADimensions(**{name: getattr(model.hf_text_config, name) for name in kernel.HEAD_DIMS})
    asked = interface.MLAPrefillSelectorConfig(dtype=model.dtype, mla_dimensions=dimensions)
    explicit = vllm_config.attention_config.mla_prefill_backend
    return select_mla_prefill_backend(kernel.get_device_capability(device), asked, explicit)
