"""What every kernel behind an interface says of itself, prefill and decode alike."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration
from mla_conformance.reference.dimensions import MLADimensions

HEAD_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


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


class UnsupportedConfiguration(ValueError):
    """A backend refuses what it does not declare, before it launches anything (SPEC 3.8)."""


def output_dtype(operands: torch.dtype) -> torch.dtype:
    """Dtype of the unquantised output of operands of this dtype: their own, or bfloat16 of e4m3 ones (SPEC 3.1)."""
    return torch.bfloat16 if operands == torch.float8_e4m3fn else operands


class KernelBackend(ABC):
    # dtypes of the queries and of unquantised keys and values; the output has :func:`output_dtype`
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    declaration: ClassVar[Declaration] = Declaration()  # rounding classes, deviations and packages, as data
    needed_capability: ClassVar[str] = ""  # compute capabilities that it runs on, for a person; empty if not restricted

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
        return not cls.missing_dependencies()

    def kernel_evidence(self) -> dict[str, str]:
        """What served the last calls, as far as the library tells: versions, variant, plan; empty if unknown."""
        return {}

    @classmethod
    def validate_configuration(cls, device_capability: DeviceCapability | None, selector_config: Any) -> list[str]:
        """Reasons why the class cannot be used for a configuration of its role; an empty list means that it can."""
        reasons, dtype = [], selector_config.dtype
        if not cls.supports_compute_capability(device_capability):
            capability = "of this device not available" if device_capability is None else f"{device_capability}"
            reasons.append(f"compute capability {capability} not supported")
        if not cls.supports_dtype(dtype):
            reasons.append(f"dtype {dtype} not supported")
        if not cls.is_available():
            missing = "; ".join(cls.missing_dependencies())
            reasons.append("required dependencies not available" + (f": {missing}" if missing else ""))
        return [*reasons, *cls._reasons(selector_config)]

    @classmethod
    def _reasons(cls, config: Any) -> Iterator[str]:
        """What of a configuration a class does not declare, beside its device and dtype."""
        return iter(())


@dataclass(eq=False, repr=False)
class HeadSizes:
    num_heads: int
    scale: float
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def dimensions(self) -> MLADimensions:
        return MLADimensions(**{name: getattr(self, name) for name in HEAD_DIMS})


@dataclass(eq=False, repr=False)
class AttentionSizes(HeadSizes):
    vllm_config: Any

    @property
    def sizes(self) -> dict[str, Any]:
        """What another instance of the same configuration is constructed with."""
        names = ("num_heads", "scale", "kv_lora_rank", *HEAD_DIMS, "vllm_config")
        return {name: getattr(self, name) for name in names}


class NamedKernel(KernelBackend):
    name: ClassVar[str]  # by which the backend is chosen and reported

    @classmethod
    def get_name(cls) -> str:
        return cls.name


def unless(*asked: tuple[object, str]) -> Iterator[str]:
    """The reasons beside which what is asked for does not hold."""
    return (reason for holds, reason in asked if not holds)


def require_declared(backend: Any, device: torch.device, selector_config: Any, **asked: Any) -> None:
    """Refuse by UnsupportedConfiguration, with every reason, what a backend does not declare of what a call wants.

    ``selector_config`` is that, or with ``asked`` its class: an instance answers itself for what it was made with.
    """
    if asked:
        names = (name for name in selector_config._fields if name not in asked and hasattr(backend, name))
        selector_config = selector_config(**{name: getattr(backend, name) for name in names}, **asked)
    reasons = backend.validate_configuration(get_device_capability(device), selector_config)
    if reasons:
        raise UnsupportedConfiguration(f"{backend.get_name()}: {'; '.join(reasons)}")


def expect(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, says: str = "") -> None:
    """Refuse by ValueError a tensor of another shape or dtype; ``says`` is what else is expected of it."""
    if x.shape != shape or x.dtype != dtype:
        expected = f"{list(shape)} of {dtype}{says and ', '}{says}"
        raise ValueError(f"{name}: expected {expected}, got {list(x.shape)} of {x.dtype}")


def expect_one(name: str, value: str, known: Sequence[str]) -> None:
    """Refuse by ValueError what is not among these names."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def int32(rows: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Numbers as a tensor."""
    return torch.tensor(rows, dtype=torch.int32, device=device)


class PagedKernel(KernelBackend):
    supported_block_sizes: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # page sizes of the cache, in tokens

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return cls.supported_block_sizes


def accepts_block_size(supported: Sequence[int | MultipleOf], block_size: int) -> bool:
    """Whether a kernel reads pages of ``block_size`` tokens; an empty list accepts every size."""
    fits = (block_size % x.base == 0 if isinstance(x, MultipleOf) else block_size == x for x in supported)
    return not supported or any(fits)
