"""The enumerations of MLA backends, one for each role, by class path (vLLM's ``registry``); torch is not imported."""

from collections.abc import Callable
from enum import Enum, EnumMeta
from importlib import import_module
from typing import Any, Self

from mla_conformance.backends.roles import Role

_PACKAGE = "mla_conformance.backends"


class _ListsValidNames(EnumMeta):
    role: Role

    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            valid = ", ".join(cls.__members__)
            raise ValueError(f"Unknown MLA {cls.role} backend: '{name}'. Valid options are: {valid}") from None


class BackendEnum(Enum, metaclass=_ListsValidNames):
    """What the enumerations of all roles share; the value of a member is the path of its class.

    It is given from this package on, and behind it the class's variants, known without importing it; one of another
    class as NAME=PATH. CUSTOM is a third party's backend, which must be registered before use.
    """

    role: Role
    _variants: dict[str, str]
    _override: str | None

    def __init_subclass__(cls, role: Role) -> None:
        cls.role = role

    def __new__(cls, path: str | None, *variants: str) -> Self:
        member = object.__new__(cls)
        named = (variant.partition("=") for variant in variants)
        member._variants = {name: of and f"{_PACKAGE}.{of}" for name, _, of in named}
        member._value_, member._override = path and f"{_PACKAGE}.{path}", None
        return member

    def get_path(self, variant: str = "") -> str:
        """Path of the class, an override first, or of a variant; ValueError of CUSTOM without a registered class."""
        if path := self._variants.get(variant) or self._override or self.value:
            return str(path)
        register = f"register_mla_{self.role}_backend({type(self).__name__}.{self.name}, 'your.module.YourClass')"
        raise ValueError(f"MLA {self.role} backend {self.name} must be registered before use: {register}")

    def get_class(self, variant: str = "") -> Any:
        found = resolve_obj_by_qualname(self.get_path(variant))
        return found.variants[variant] if variant and not self._variants[variant] else found

    def variants(self) -> tuple[str, ...]:
        """Kernels that share this name, each to be named as ``NAME[variant]``; none of an overriding class."""
        return () if self._override is not None else tuple(self._variants)

    def is_overridden(self) -> bool:
        return self._override is not None

    def clear_override(self) -> None:
        self._override = None


class MLAPrefillBackendEnum(BackendEnum, role=Role.PREFILL):
    EAGER = (
        "eager.EagerPrefillBackend",
        "earlier=generations.earlier.EarlierEagerPrefillBackend",
        "present=generations.present.PresentEagerPrefillBackend",
    )
    TORCH_SDPA = "torch_sdpa.TorchSDPAPrefillBackend", "efficient=torch_sdpa.TorchEfficientPrefillBackend"
    FLEX_ATTENTION = "flex_attention.FlexAttentionPrefillBackend"
    FLASH_ATTN = "flash_attn.FlashAttnPrefillBackend", "fa2", "torch", "fa3", "fa4"
    FLASHINFER = "flashinfer.FlashInferPrefillBackend", "fa2", "fa3", "cutlass"
    CUDNN = "cudnn.CudnnPrefillBackend", "graph", "flashinfer", "fp8"
    TRTLLM_RAGGED = "flashinfer.TrtllmRaggedPrefillBackend"
    TRTLLM = "trtllm.TrtllmPrefillBackend", "sm90", "sm100"
    TOKENSPEED_MLA = "tokenspeed_mla.TokenspeedMLAPrefillBackend"
    TRITON_ATTN = "vllm_ops.TritonAttnPrefillBackend"
    SGLANG_TRITON = "sglang_triton.SGLangTritonPrefillBackend", "interpreted"
    LMDEPLOY_TRITON = "lmdeploy_triton.LmdeployPrefillBackend", "interpreted"
    CUSTOM = None


class MLADecodeBackendEnum(BackendEnum, role=Role.DECODE):
    EAGER = "eager_decode.EagerDecodeBackend"
    TORCH_SDPA = "torch_sdpa.TorchSDPADecodeBackend", "efficient=torch_sdpa.TorchEfficientDecodeBackend"
    FLASHINFER_MLA = "flashinfer_mla.FlashInferMLADecodeBackend", "fa2", "fa3"
    TRITON_MLA = "vllm_ops.TritonMLADecodeBackend", "lse-float32", "interpreted"
    SGLANG_TRITON = "sglang_triton.SGLangTritonDecodeBackend", "interpreted"
    AITER_TRITON_MLA = "aiter_triton.AiterTritonDecodeBackend", "prefill", "interpreted", "prefill-interpreted"
    LMDEPLOY_TRITON = "lmdeploy_triton.LmdeployDecodeBackend", "interpreted"
    FLASHMLA = "flash_mla.FlashMLADecodeBackend"
    FLASH_ATTN_MLA = "flash_attn.FlashAttnMLADecodeBackend", "upstream", "sglang", "vllm"
    TOKENSPEED_MLA = "tokenspeed_mla.TokenspeedMLADecodeBackend"
    CUTLASS_MLA = "vllm_ops.CutlassMLADecodeBackend"
    TRTLLM = "trtllm.TrtllmDecodeBackend", "sm90", "sm100"
    CUSTOM = None


class MLASparseBackendEnum(BackendEnum, role=Role.SPARSE):
    EAGER = "eager_sparse.EagerSparseBackend"
    TORCH_SDPA = "torch_sdpa.TorchSDPASparseBackend", "efficient=torch_sdpa.TorchEfficientSparseBackend"
    FLASH_ATTN_MLA_SPARSE = "flash_attn.FlashAttnMLASparseBackend"
    FLASHMLA_SPARSE = "flash_mla.FlashMLASparseBackend", "float32"
    FLASHINFER_MLA_SPARSE_SM90 = "flashinfer_mla.FlashInferMLASparseSM90Backend"
    FLASHINFER_MLA_SPARSE = "flashinfer_mla.FlashInferMLASparseBackend"
    SGLANG_TRITON_SPARSE = "sglang_triton.SGLangTritonSparseBackend", "union2", "union4", "interpreted"
    AITER_TRITON_SPARSE = "aiter_triton.AiterTritonSparseBackend", "interpreted"
    CUSTOM = None


class MLAIndexerBackendEnum(BackendEnum, role=Role.INDEXER):
    EAGER = "eager_indexer.EagerIndexerBackend"
    DEEPGEMM_INDEXER = "deep_gemm.DeepGemmIndexerBackend", "vllm"
    LMDEPLOY_TRITON = "lmdeploy_triton.LmdeployIndexerBackend", "interpreted"


class MLATopKBackendEnum(BackendEnum, role=Role.TOPK):
    EAGER = "eager_topk.EagerTopKBackend"
    VLLM_TOPK = "vllm_ops.VllmTopKBackend", "prefill", "decode", "persistent", "cooperative"
    LMDEPLOY_TRITON = "lmdeploy_triton.LmdeployTopKBackend", "interpreted"


class MLAPrepareBackendEnum(BackendEnum, role=Role.PREPARE):
    EAGER = "eager_prepare.EagerPrepareBackend"
    LMDEPLOY_TRITON = "lmdeploy_triton.LmdeployPrepareBackend"


class MLACompressBackendEnum(BackendEnum, role=Role.COMPRESS):
    EAGER = "eager_compress.EagerCompressBackend"
    SGLANG_COMPRESS = "sglang_compress.SGLangCompressBackend"


class MLACacheBackendEnum(BackendEnum, role=Role.CACHE):
    EAGER = "eager_cache.EagerCacheBackend"
    VLLM_CACHE = "vllm_ops.VllmCacheBackend"
    SGLANG_TRITON_CACHE = "sglang_triton.SGLangTritonCacheBackend", "interpreted"


class MLASparseLayerBackendEnum(BackendEnum, role=Role.SPARSE_LAYER):
    EAGER = "eager_sparse_layer.EagerSparseLayerBackend"
    VLLM_SPARSE_LAYER = "vllm_sparse_layer.VllmSparseLayerBackend", "flash-attn"
    SGLANG_DSA = "sglang_dsa.SGLangDSABackend", "fa3", "triton_sparse_mla", "triton", "flashmla_sparse"


class MLATreeBackendEnum(BackendEnum, role=Role.TREE):
    EAGER = "eager_tree.EagerTreeBackend"
    TORCH_SDPA_TREE = "torch_sdpa.TorchSDPATreeBackend"
    SGLANG_TRITON_TREE = "sglang_triton.SGLangTritonTreeBackend", "interpreted"
    FLASHINFER_TREE = "flashinfer.FlashInferTreeBackend"


ENUMS = tuple(BackendEnum.__subclasses__())  # the enumerations of all roles


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object at ``package.module.Name``; ImportError without such a module, or such a name in it."""
    module, _, name = qualname.rpartition(".")
    loaded = import_module(module)
    if not hasattr(loaded, name):
        raise ImportError(f"module {module} has no '{name}'", name=module)
    return getattr(loaded, name)


def register_mla_prefill_backend(backend: BackendEnum, class_path: str | None = None) -> Callable[[type], type]:
    """Register or override a member's class, by its path or as a decorator of it, in whatever role."""

    def decorator(cls: type) -> type:
        backend._override = f"{cls.__module__}.{cls.__qualname__}"
        return cls

    if class_path is None:
        return decorator
    backend._override = class_path
    return lambda cls: cls


register_mla_decode_backend = register_mla_sparse_backend = register_mla_prefill_backend
