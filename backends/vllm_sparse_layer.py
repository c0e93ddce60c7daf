"""VLLM_SPARSE_LAYER: a whole layer as vLLM 0.33.0 makes it around its FLASHMLA_SPARSE or its FLASH_ATTN_MLA_SPARSE."""

from typing import Any, ClassVar

import torch

from mla_conformance.backends import packaged
from mla_conformance.backends.generations.sparse_layer_adapter import AdaptedSparseLayer

_CLASSES = "vllm.v1.attention.backends.mla"


class VllmSparseLayerBackend(packaged.LibraryKernel, AdaptedSparseLayer):
    name = "VLLM_SPARSE_LAYER"
    libraries = (packaged.in_extra("vllm", f"{_CLASSES}.flashmla_sparse"),)
    devices = packaged.HOPPER
    kernel: ClassVar[str] = "FlashMLASparseBackend"  # the class that is driven
    supported_dtypes = [torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "fp8_ds_mla"]

    @classmethod
    def driven(cls) -> Any:
        return getattr(cls.libraries[0].found().load(), cls.kernel)

    @classmethod
    def lacks(cls) -> str:
        return next(iter(AdaptedSparseLayer.broken_dependencies()), "")

    def kernel_evidence(self) -> dict[str, str]:
        return super().kernel_evidence() | AdaptedSparseLayer.kernel_evidence(self)


VllmSparseLayerBackend.also(
    "flash-attn",
    libraries=(packaged.in_extra("vllm", f"{_CLASSES}.flashattn_mla_sparse"),),
    kernel="FlashAttnMLASparseBackend",
    supported_dtypes=[torch.float16, torch.bfloat16],
    supported_kv_cache_dtypes=["auto"],
)
