"""The abstract MLA prefill backend: names and keywords of vLLM's ``v1.attention.backends.mla.prefill.base``."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.reference.dimensions import MLADimensions

__all__ = ["MLADimensions", "MLAPrefillBackend", "MLAPrefillSelectorConfig", "UnsupportedConfiguration"]


class UnsupportedConfiguration(ValueError):
    """A backend refuses what it does not declare, before it launches anything (SPEC 3.8)."""


class MLAPrefillSelectorConfig(NamedTuple):
    """What a backend is validated against; hashable."""

    dtype: torch.dtype
    mla_dimensions: MLADimensions


class MLAPrefillBackend(ABC):
    """Prefill attention over up-projected keys and values.

    Symbols: T query tokens, S key tokens, N heads on this rank, P/R/V the nope, rope and value head dims.

    Attributes:
        supported_dtypes: dtypes of q, k, v and the output.
        supported_mla_dimensions: head dims; empty means any.
        declaration: rounding classes, deviations and packages, as data.
        needed_capability: the compute capabilities that the kernel runs on, for a person; empty if not restricted.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = []
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
        """Whether q, k and v may have ``dtype``."""
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Whether the kernel computes these head dims."""
        return not cls.supported_mla_dimensions or dimensions in cls.supported_mla_dimensions

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> "type[MLAPrefillBackend]":
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

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Whether ``run_prefill_new_tokens`` writes ``out`` quantised by ``quant_key`` itself (fused)."""
        return False

    def kernel_evidence(self) -> dict[str, str]:
        """What served the last calls, as far as the library tells: versions, variant, plan; empty if unknown."""
        return {}

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: MLAPrefillSelectorConfig
    ) -> list[str]:
        """Reasons why the backend cannot be used; an empty list means that it can."""
        reasons = []
        if not cls.supports_compute_capability(device_capability):
            capability = "of this device not available" if device_capability is None else f"{device_capability}"
            reasons.append(f"compute capability {capability} not supported")
        if not cls.supports_dtype(selector_config.dtype):
            reasons.append(f"dtype {selector_config.dtype} not supported")
        if not cls.is_available():
            missing = "; ".join(cls.missing_dependencies())
            reasons.append("required dependencies not available" + (f": {missing}" if missing else ""))
        if not cls.supports_mla_dimensions(selector_config.mla_dimensions):
            supported = ", ".join(map(str, cls.supported_mla_dimensions))
            listing = f" (supported: {supported})" if supported else ""
            reasons.append(f"MLA dimensions {selector_config.mla_dimensions} not supported{listing}")
        return reasons

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: Any,
    ) -> None:
        self.num_heads = num_heads
        self.scale = scale
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.vllm_config = vllm_config

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        """Take the metadata of the next calls; called once per batch."""
        self._prefill_metadata = prefill_metadata

    @abstractmethod
    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Causal attention among each request's new tokens.

        Args:
            q: [T, N, P + R], rope applied.
            k: [T, N, P + R].
            v: [T, N, V]; any strides.
            return_softmax_lse: whether to return the LSE as well.
            out: [T, N, V] to be written; the returned tensor then shares its storage.
            output_scale: float32 scalar tensor; ``out`` is e4m3 and receives the codes of value / output_scale.

        Returns:
            The output [T, N, V], or (output, lse) with lse [N, T] float32, natural logarithm.
        """

    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unmasked attention of the new tokens to one chunk of cached context.

        Args:
            chunk_idx: index into ``chunked_context``.
            q: [T, N, P + R].
            k: [S, N, P + R], the chunk's keys of all requests one after the other.
            v: [S, N, V]; any strides.

        Returns:
            (output [T, N, V], lse [N, T] float32, natural logarithm); a row without keys is 0 and -inf.
        """
