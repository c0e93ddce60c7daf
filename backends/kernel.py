"""What every kernel behind an interface says of itself, prefill and decode alike."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.platform import DeviceCapability


class UnsupportedConfiguration(ValueError):
    """A backend refuses what it does not declare, before it launches anything (SPEC 3.8)."""


def output_dtype(operands: torch.dtype) -> torch.dtype:
    """Dtype of the unquantised output of operands of this dtype: their own, or bfloat16 of e4m3 ones (SPEC 3.1)."""
    return torch.bfloat16 if operands == torch.float8_e4m3fn else operands


class KernelBackend(ABC):
    """Name, requirements and evidence of a kernel.

    Attributes:
        supported_dtypes: dtypes of the queries and of unquantised keys and values; the output has :func:`output_dtype`.
        declaration: rounding classes, deviations and packages, as data.
        needed_capability: the compute capabilities that the kernel runs on, for a person; empty if not restricted.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    declaration: ClassVar[Declaration] = Declaration()
    needed_capability: ClassVar[str] = ""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Name by which the backend is chosen and reported."""

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Whether the kernel runs on such a device; None is a device without compute capability, such as a CPU."""
        return True

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        """Whether the operands may have ``dtype``."""
        return dtype in cls.supported_dtypes

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> "type[KernelBackend]":
        """The class that serves calls on such a device; another one where several kernels share a name."""
        return cls

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """What must be installed first, each with the command that does it; imports nothing heavy."""
        return []

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        """What is installed and does not import, each with its error; imports the libraries."""
        return []

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library behind the backend is installed."""
        return not cls.missing_dependencies()

    def kernel_evidence(self) -> dict[str, str]:
        """What served the last calls, as far as the library tells: versions, variant, plan; empty if unknown."""
        return {}

    @classmethod
    def requirement_reasons(cls, device_capability: DeviceCapability | None, dtype: torch.dtype) -> list[str]:
        """Reasons why the kernel cannot run on such a device with such a dtype; an empty list means that it can."""
        reasons = []
        if not cls.supports_compute_capability(device_capability):
            capability = "of this device not available" if device_capability is None else f"{device_capability}"
            reasons.append(f"compute capability {capability} not supported")
        if not cls.supports_dtype(dtype):
            reasons.append(f"dtype {dtype} not supported")
        if not cls.is_available():
            missing = "; ".join(cls.missing_dependencies())
            reasons.append("required dependencies not available" + (f": {missing}" if missing else ""))
        return reasons
