"""The common MLA layer (vLLM's ``MLACommonBackend``), composed of a prefill and a decode backend."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.decode import MLADecodeBackend
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.kernel import DeviceCapability
from mla_conformance.backends.layer.attention_layer import AttentionBackend, subclass_attention_backend_with_overrides
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata
from mla_conformance.backends.layer.mla_state import MLACommonState
from mla_conformance.reference.cache_layout import cache_dtype, entry_width

_LATENT, _ROPE = 512, 64


class MLACommonBackend(AttentionBackend):
    accept_output_buffer = True
    prefill_backend: ClassVar[type[MLAPrefillBackend] | None] = None  # computes prefills; None if the layer has none
    decode_backend: ClassVar[type[MLADecodeBackend] | None] = None  # computes decodes; None if the layer has none
    impl_class: ClassVar[type[MLACommonImpl]] = MLACommonImpl  # computes
    builder_class: ClassVar[type[MLACommonMetadataBuilder]] = MLACommonMetadataBuilder  # builds the metadata
    vllm_config: ClassVar[Any] = None  # what the kernels' constructors receive
    tile_scales: ClassVar[str] = "float32"  # what the scales of an ``fp8_ds_mla`` entry are when it is written

    @classmethod
    def get_name(cls) -> str:
        names = [kernel.get_name() for kernel in cls._kernels()]
        return "+".join(dict.fromkeys(names)) or "MLA_COMMON"

    @classmethod
    def get_impl_cls(cls) -> type[MLACommonImpl]:
        return _bound(cls.impl_class, cls)

    @classmethod
    def get_builder_cls(cls) -> type[MLACommonMetadataBuilder]:
        return _bound(cls.builder_class, cls)

    @staticmethod
    def get_metadata_cls() -> type[MLACommonMetadata]:
        return MLACommonMetadata

    @staticmethod
    def get_state_cls() -> type[MLACommonState]:
        return MLACommonState

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[blocks, page, entry]; an entry's elements are those of the cache's dtype."""
        if num_kv_heads != 1:
            raise ValueError(f"expected num_kv_heads 1, all heads share a latent, got {num_kv_heads}")
        return num_blocks, block_size, entry_width(layout_of(cache_dtype_str), *_latent_dims(head_size))

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        source, target = src_kv_cache.view(torch.uint8), dst_kv_cache.view(torch.uint8)
        pairs = src_to_dst.long()
        copied = source[pairs[:, 0].to(source.device)].to(target.device)
        target[pairs[:, 1].to(target.device)] = copied

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        for each in kv_caches:
            MLACommonBackend.swap_blocks(each, each, src_to_dists)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """L + R that the decode backend reads; that of DeepSeek's models for a layer without one."""
        if cls.decode_backend is None:
            return [576] if cls.prefill_backend is None else []
        return [latent + rope for latent, rope in cls.decode_backend.supported_latent_dims]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [MultipleOf(1)] if cls.decode_backend is None else cls.decode_backend.get_supported_kernel_block_sizes()

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return all(kernel.supports_compute_capability(capability) for kernel in cls._kernels())

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        try:
            layout = layout_of(kv_cache_dtype or "auto")
            entry_width(layout, *_latent_dims(head_size))
            cache_dtype(layout, dtype)
        except ValueError as error:
            return str(error)
        missing = [reason for kernel in cls._kernels() for reason in kernel.missing_dependencies()]
        return f"required dependencies not available: {'; '.join(missing)}" if missing else None

    @classmethod
    def _kernels(cls) -> list[type[MLAPrefillBackend] | type[MLADecodeBackend]]:
        return [kernel for kernel in (cls.prefill_backend, cls.decode_backend) if kernel is not None]


def _latent_dims(head_size: int) -> tuple[int, int]:
    """L and R of an entry; only fp8_ds_mla asks, and only a rope of 64 will do for it, or none beside 512."""
    return (_LATENT, 0) if head_size == _LATENT else (head_size - _ROPE, _ROPE)


def mla_backend(
    prefill: type[MLAPrefillBackend] | None,  # computes prefills; None for a layer that only decodes
    decode: type[MLADecodeBackend] | None,  # computes decodes; None for a layer that only prefills
    base: type[MLACommonBackend] = MLACommonBackend,  # the layer's class, such as one with another ``impl_class``
) -> type[MLACommonBackend]:
    """The MLA layer of two kernels."""
    kernels = [kernel for kernel in (prefill, decode) if kernel is not None]
    if not kernels:
        raise ValueError("expected a prefill or a decode backend, got neither")
    layouts = ["auto", "fp8", "fp8_ds_mla"] if decode is None else decode.supported_kv_cache_dtypes
    attributes = {
        "__module__": base.__module__,
        "prefill_backend": prefill,
        "decode_backend": decode,
        "supported_dtypes": [d for d in kernels[0].supported_dtypes if kernels[-1].supports_dtype(d)],
        "supported_kv_cache_dtypes": layouts,
    }
    return type(base.__name__, (base,), attributes)


@cache
def _bound(part: Any, backend: type[MLACommonBackend]) -> Any:
    known = {"attention_backend": backend, "__module__": part.__module__}
    return subclass_attention_backend_with_overrides("", part, known)
