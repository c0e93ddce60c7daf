"""The attention-layer interface, vLLM's ``AttentionBackend``: a backend names its classes and says what it supports."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeVar

import torch

from mla_conformance.backends import cache_dtypes, kernel
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.layer.attention_impl import AttentionImpl, AttentionMetadataBuilder, AttentionType

Subclassed = TypeVar("Subclassed")
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""Page sizes, in tokens, that vLLM's configuration admits (``BlockSize`` of its cache configuration)."""


class AttentionBackend(ABC):
    accept_output_buffer: bool = False  # whether the caller allocates the output
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]  # dtypes of the model
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # cache dtypes by name; empty means any

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Page sizes that the kernel reads, in tokens; empty means any."""
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Logical shape of one layer's cache of pages of ``block_size`` tokens; MLA has one head, of L + R elements."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Order of the cache's dimensions in memory, outermost first; NotImplementedError: as the logical shape."""
        raise NotImplementedError("the cache lies in memory as its logical shape says")

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head sizes in elements; empty means any."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        supported = cls.supported_kv_cache_dtypes
        return kv_cache_dtype is None or not supported or cache_dtypes.layout_of(kv_cache_dtype) in supported

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """A multiple of what the kernel reads is enough, even of a fixed size: the layer above can split its pages."""
        if block_size is None:
            return True
        bases = [size.base if isinstance(size, MultipleOf) else size for size in cls.get_supported_kernel_block_sizes()]
        return block_size in BLOCK_SIZES and (not bases or any(block_size % base == 0 for base in bases))

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:  # whether the tokens of an image may attend to each other in both directions
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: kernel.DeviceCapability | None) -> bool:
        """None is a device without compute capability, such as a CPU."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: kernel.DeviceCapability | None,
        attn_type: str,
    ) -> list[str]:
        layouts, wrong = cls.supported_kv_cache_dtypes, cache_dtypes.contradiction(kv_cache_dtype, dtype)
        blocks = f"multiples of {cls.get_supported_kernel_block_sizes()} among {BLOCK_SIZES}"
        device = f"compute capability not supported: got {device_capability or 'a device without one'}"
        mla, sparse = "MLA" if use_mla else "non-MLA", "sparse" if use_sparse else "non-sparse"

        def refusal(setting: str, got: object, supported: list[Any]) -> str:
            return f"{setting} not supported: got {got} (supported: {', '.join(map(str, supported))})"

        checks = (
            (cls.supports_head_size(head_size), refusal("head_size", head_size, cls.get_supported_head_sizes())),
            (cls.supports_dtype(dtype), refusal("dtype", dtype, cls.supported_dtypes)),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), refusal("kv_cache_dtype", kv_cache_dtype, layouts)),
            (not wrong, wrong),
            (cls.supports_block_size(block_size), refusal("block_size", block_size, [blocks])),
            (not use_mm_prefix or cls.supports_mm_prefix(), "partial multimodal token full attention not supported"),
            (use_mla == cls.is_mla(), f"{mla} not supported"),
            (not has_sink or cls.supports_sink(), "sink setting not supported"),
            (use_sparse == cls.is_sparse(), f"{sparse} not supported"),
            (cls.supports_compute_capability(device_capability), device),
            (cls.supports_attn_type(attn_type), f"attention type {attn_type} not supported"),
        )
        reasons = [reason for supported, reason in checks if not supported]
        combination = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, device_capability
        )
        return reasons if combination is None else [*reasons, combination]

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:  # None if any will do
        return None


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[Subclassed], builder_cls: type[AttentionMetadataBuilder[Any]]
) -> type[Subclassed]:
    """A subclass, its name prefixed, whose ``get_builder_cls`` returns ``builder_cls``."""
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": staticmethod(lambda: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[Subclassed], overrides: dict[str, Any]
) -> type[Subclassed]:
    """A subclass, its name prefixed, with the attributes of ``overrides``; also of a class that a backend names."""
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), overrides)
