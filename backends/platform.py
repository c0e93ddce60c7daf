"""The compute capability of a device, in vLLM's terms."""

from typing import NamedTuple

import torch


class DeviceCapability(NamedTuple):
    """Compute capability of a CUDA device, for example (9, 0) for an H200."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class Devices(NamedTuple):
    """Devices that a kernel runs on.

    Attributes:
        end: the least beyond them; None without one.
    """

    needed: str  # their compute capabilities, for a person
    first: tuple[int, int]  # the least of them
    end: tuple[int, int] | None = None

    def include(self, capability: DeviceCapability | None) -> bool:
        """Whether a device of this compute capability is one of them; one without any is none."""
        return capability is not None and self.first <= capability and (self.end is None or capability < self.end)


FROM_TURING = Devices("7.5 or newer", (7, 5))
FROM_AMPERE = Devices("8.0 or newer", (8, 0))
FROM_ADA = Devices("8.9 or newer", (8, 9))
FROM_HOPPER = Devices("9.0 or newer", (9, 0))
HOPPER = Devices("9.0", (9, 0), (10, 0))
BLACKWELL = Devices("10.x", (10, 0), (11, 0))
"""Blackwell of data centres: 10.0, 10.3, 10.7."""


def get_device_capability(device: torch.device) -> DeviceCapability | None:
    """Capability of ``device``; None for a device that has none, such as a CPU."""
    if device.type != "cuda":
        return None
    return DeviceCapability(*torch.cuda.get_device_capability(device))


def describe_device(device: torch.device) -> str:
    """A person's name for ``device``: the GPU's product name, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
