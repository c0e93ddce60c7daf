"""Drives an attention backend of vLLM's as a layer: the class that names its parts, unchanged.

Since this project's interface of a layer, vLLM moved the cache's writes, the absorption and the order of prefills and
decodes out of the backend into a module around it, the buffers of graphs into its runner, and copies of blocks away
from the backend. So it is that module which is driven; what has no place in it is not asked for.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.cache_dtypes import layout_of
from mla_conformance.backends.declaration import Declaration, Deviation, Precision, Rounding
from mla_conformance.backends.foreign import reasons_of
from mla_conformance.backends.generations.adapted import adapter_of
from mla_conformance.backends.generations.layer_impl import AdaptedLayerBuilder, AdaptedLayerImpl
from mla_conformance.backends.generations.vllm import LAYER_MODULE, why_no_prefill
from mla_conformance.backends.kernel import DeviceCapability, accepts_block_size
from mla_conformance.backends.layer.mla_batch import BatchForm, count_decodes

_DEVIATIONS = (
    Deviation("its layer writes the cache and absorbs the weights", "vLLM's ``MLAAttention`` is made around it"),
    Deviation("reads an engine's configuration", "vLLM's defaults, eager, with the sizes of the case"),
    Deviation("takes decodes first only", "of a batch whose prefills come first the rows are reordered, and back"),
    Deviation("padding is requests without a query in block 0", "translated, as vLLM's runner pads a batch"),
    Deviation("knows a decode by its length alone", "declared unsupported where a cache of codes tells the difference"),
)
# Its prefills gather context into a workspace of the model's dtype.
_DECLARATION = Declaration(distributions=("vllm", "torch"), rounding=Rounding(dequantised_keys=Precision.MODEL))


class AdaptedLayerBackend:
    """An attention backend whose computation is split into ``forward_mha`` and ``forward_mqa``."""

    wrapped: ClassVar[Any]  # the class that is driven
    tile_scales: ClassVar[str] = "pow2"  # what vLLM's writer makes the scales of an ``fp8_ds_mla`` entry

    @classmethod
    def adapt(cls, wrapped: Any) -> type[Self]:
        """A class that drives ``wrapped`` and says of itself what that one says."""
        declared = getattr(wrapped, "declaration", None) or _DECLARATION
        declaration = replace(declared, deviations=(*declared.deviations, *_DEVIATIONS))
        adapted: type[Self] = adapter_of(wrapped, cls, declaration=declaration)
        return adapted

    @classmethod
    def get_impl_cls(cls) -> Any:
        """What makes the module around the driven class."""
        return partial(AdaptedLayerImpl, cls.wrapped)

    @classmethod
    def get_builder_cls(cls) -> Any:
        """What drives the builder that the driven class names."""
        return AdaptedLayerBuilder

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        try:
            return bool(cls.wrapped.supports_compute_capability(capability))
        except AttributeError:
            if capability is None:
                return False
            raise

    @classmethod
    def validate_configuration(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int, **asked: Any
    ) -> list[str]:
        if not cls.supports_compute_capability(asked["device_capability"]):
            return ["compute capability not supported"]
        # Of the kernel; vLLM's class also takes pages that its engine splits.
        pages = cls.wrapped.get_supported_kernel_block_sizes()
        ours = [size if isinstance(size, int) else MultipleOf(size.base) for size in pages]
        if not accepts_block_size(ours, block_size):
            return [f"pages of {block_size} tokens not supported"]
        configuration = {
            "head_size": head_size, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "block_size": block_size,
            "use_per_head_quant_scales": False,
        } | asked  # fmt: skip
        reasons = reasons_of(cls.wrapped.validate_configuration(**configuration))
        if not import_module(LAYER_MODULE).MLACommonBackend.supports_head_size(head_size):
            reasons.append(f"head size {head_size} not supported by vLLM's MLA metadata")
        return reasons

    @classmethod
    def unsupported_batch(cls, batch: BatchForm) -> list[str]:
        """Why such a batch cannot be asked for."""
        reasons = []
        if batch.prefills and batch.padding:
            reasons.append("rows of padding behind prefills: vLLM leaves them undefined")
        missing = why_no_prefill(batch.dtype, batch.dimensions) if batch.prefills else ""
        if missing:
            reasons.append(f"prefills: {missing}")
        if layout_of(batch.kv_cache_dtype) != "auto":
            builder = cls.wrapped.get_builder_cls()  # which sees lengths alone
            support, threshold = builder.query_len_support.value, builder.reorder_batch_threshold
            if support != "single_only":
                threshold = max(threshold, *batch.decodes, 1)
            lengths = torch.tensor([*batch.decodes, *batch.prefills])
            if count_decodes(lengths, threshold, support != "varlen") != len(batch.decodes):
                reasons.append("a decode that its builder takes for a prefill, or the reverse, over a cache of codes")
        return reasons
