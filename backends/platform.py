"""The compute capability of a device, in vLLM's terms."""

from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """Compute capability of a CUDA device, for example (9, 0) for an H200."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def get_device_capability(device: torch.device) -> DeviceCapability | None:
    """Capability of ``device``; None for a device that has none, such as a CPU."""
    if device.type != "cuda":
        return None
    return DeviceCapability(*torch.cuda.get_device_capability(device))


def describe_device(device: torch.device) -> str:
    """A person's name for ``device``: the GPU's product name, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
