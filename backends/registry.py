"""The enumerations of MLA backends, one for each role, by class path (vLLM's ``registry``); torch is not imported."""

from collections.abc import Callable
from enum import Enum, EnumMeta
from importlib import import_module
from typing import Any, Self

from mla_conformance.backends.roles import Role


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

    Behind the path stand the names of the class's variants, if it has any, which are known without importing it; one
    that is not among the ``variants`` of the class stands there as NAME=PATH. CUSTOM is a third party's backend, which
    must be registered before use.
    """

    # what the members' classes compute
    role: Role  # type: ignore[misc]  # an attribute, which mypy takes for a member
    _variants: dict[str, str]
    _override: str | None

    def __init_subclass__(cls, role: Role) -> None:
        cls.role = role

    def __new__(cls, path: str | None, *variants: str) -> Self:
        member = object.__new__(cls)
        named = dict(variant.partition("=")[::2] for variant in variants)
        member._value_, member._variants, member._override = path, named, None
        return member

    def get_path(self, variant: str = "") -> str:
        """Path of the backend's class, an override first; of a variant that of the class that it is among.

        ValueError of CUSTOM without a registered class.
        """
        path = self._variants.get(variant) or self._override or self.value
        if not path:
            role, enum = self.role, type(self).__name__
            raise ValueError(
                f"MLA {role} backend {self.name} must be registered before use: "
                f"register_mla_{role}_backend({enum}.{self.name}, 'your.module.YourClass')"
            )
        return str(path)

    def get_class(self, variant: str = "") -> Any:
        """The class at :meth:`get_path`, imported, or one of its :meth:`variants`; ImportError where that fails."""
        found = resolve_obj_by_qualname(self.get_path(variant))
        return found.variants[variant] if variant and not self._variants[variant] else found

    def variants(self) -> tuple[str, ...]:
        """Kernels that share this name, each to be named as ``NAME[variant]``; none of an overriding class."""
        return () if self._override is not None else tuple(self._variants)

    def is_overridden(self) -> bool:
        return self._override is not None

    def override(self, class_path: str) -> None:
        self._override = class_path

    def clear_override(self) -> None:
        self._override = None


class MLAPrefillBackendEnum(BackendEnum, role=Role.PREFILL):
    EAGER = (
        "mla_conformance.backends.eager.EagerPrefillBackend",
        "earlier=mla_conformance.backends.eager.EarlierEagerPrefillBackend",
        "present=mla_conformance.backends.eager.PresentEagerPrefillBackend",
    )
    TORCH_SDPA = (
        "mla_conformance.backends.torch_sdpa.TorchSDPAPrefillBackend",
        "efficient=mla_conformance.backends.torch_sdpa.TorchEfficientPrefillBackend",
    )
    FLEX_ATTENTION = "mla_conformance.backends.flex_attention.FlexAttentionPrefillBackend"
    FLASH_ATTN = "mla_conformance.backends.flash_attn.FlashAttnPrefillBackend", "fa2", "torch", "fa3", "fa4"
    FLASHINFER = "mla_conformance.backends.flashinfer.FlashInferPrefillBackend", "fa2", "fa3", "cutlass"
    CUDNN = "mla_conformance.backends.cudnn.CudnnPrefillBackend", "graph", "flashinfer", "fp8"
    TRTLLM_RAGGED = "mla_conformance.backends.trtllm_ragged.TrtllmRaggedPrefillBackend"
    TRTLLM = "mla_conformance.backends.trtllm.TrtllmPrefillBackend", "sm90", "sm100"
    TOKENSPEED_MLA = "mla_conformance.backends.tokenspeed_mla.TokenspeedMLAPrefillBackend"
    TRITON_ATTN = "mla_conformance.backends.triton_attn.TritonAttnPrefillBackend"
    SGLANG_TRITON = "mla_conformance.backends.sglang_triton.SGLangTritonPrefillBackend", "interpreted"
    LMDEPLOY_TRITON = "mla_conformance.backends.lmdeploy_triton.LmdeployPrefillBackend", "interpreted"
    CUSTOM = None


class MLADecodeBackendEnum(BackendEnum, role=Role.DECODE):
    EAGER = "mla_conformance.backends.eager_decode.EagerDecodeBackend"
    TORCH_SDPA = (
        "mla_conformance.backends.torch_rows.TorchSDPADecodeBackend",
        "efficient=mla_conformance.backends.torch_rows.TorchEfficientDecodeBackend",
    )
    FLASHINFER_MLA = "mla_conformance.backends.flashinfer_mla.FlashInferMLADecodeBackend", "fa2", "fa3"
    TRITON_MLA = "mla_conformance.backends.triton_mla.TritonMLADecodeBackend", "lse-float32", "interpreted"
    SGLANG_TRITON = "mla_conformance.backends.sglang_triton.SGLangTritonDecodeBackend", "interpreted"
    AITER_TRITON_MLA = (
        "mla_conformance.backends.aiter_triton.AiterTritonDecodeBackend",
        "prefill",
        "interpreted",
        "prefill-interpreted",
    )
    LMDEPLOY_TRITON = "mla_conformance.backends.lmdeploy_triton.LmdeployDecodeBackend", "interpreted"
    FLASHMLA = "mla_conformance.backends.flash_mla.FlashMLADecodeBackend"
    FLASH_ATTN_MLA = "mla_conformance.backends.flash_attn_mla.FlashAttnMLADecodeBackend", "upstream", "sglang", "vllm"
    TOKENSPEED_MLA = "mla_conformance.backends.tokenspeed_mla.TokenspeedMLADecodeBackend"
    CUTLASS_MLA = "mla_conformance.backends.cutlass_mla.CutlassMLADecodeBackend"
    TRTLLM = "mla_conformance.backends.trtllm.TrtllmDecodeBackend", "sm90", "sm100"
    CUSTOM = None


class MLASparseBackendEnum(BackendEnum, role=Role.SPARSE):
    EAGER = "mla_conformance.backends.eager_sparse.EagerSparseBackend"
    TORCH_SDPA = (
        "mla_conformance.backends.torch_rows.TorchSDPASparseBackend",
        "efficient=mla_conformance.backends.torch_rows.TorchEfficientSparseBackend",
    )
    FLASH_ATTN_MLA_SPARSE = "mla_conformance.backends.flash_attn_mla_sparse.FlashAttnMLASparseBackend"
    FLASHMLA_SPARSE = "mla_conformance.backends.flash_mla_sparse.FlashMLASparseBackend", "float32"
    FLASHINFER_MLA_SPARSE_SM90 = "mla_conformance.backends.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend"
    FLASHINFER_MLA_SPARSE = "mla_conformance.backends.flashinfer_mla_sparse.FlashInferMLASparseBackend"
    SGLANG_TRITON_SPARSE = (
        "mla_conformance.backends.sglang_triton_sparse.SGLangTritonSparseBackend",
        "union2",
        "union4",
        "interpreted",
    )
    AITER_TRITON_SPARSE = "mla_conformance.backends.aiter_triton_sparse.AiterTritonSparseBackend", "interpreted"
    CUSTOM = None


class MLAIndexerBackendEnum(BackendEnum, role=Role.INDEXER):
    EAGER = "mla_conformance.backends.eager_indexer.EagerIndexerBackend"
    DEEPGEMM_INDEXER = "mla_conformance.backends.deep_gemm.DeepGemmIndexerBackend", "vllm"
    LMDEPLOY_TRITON = "mla_conformance.backends.lmdeploy_index.LmdeployIndexerBackend", "interpreted"
    CUSTOM = None


class MLATopKBackendEnum(BackendEnum, role=Role.TOPK):
    EAGER = "mla_conformance.backends.eager_topk.EagerTopKBackend"
    VLLM_TOPK = "mla_conformance.backends.vllm_topk.VllmTopKBackend", "prefill", "decode", "persistent", "cooperative"
    LMDEPLOY_TRITON = "mla_conformance.backends.lmdeploy_index.LmdeployTopKBackend", "interpreted"
    CUSTOM = None


class MLAPrepareBackendEnum(BackendEnum, role=Role.PREPARE):
    EAGER = "mla_conformance.backends.eager_prepare.EagerPrepareBackend"
    LMDEPLOY_TRITON = "mla_conformance.backends.lmdeploy_index.LmdeployPrepareBackend"
    CUSTOM = None


class MLACompressBackendEnum(BackendEnum, role=Role.COMPRESS):
    EAGER = "mla_conformance.backends.eager_compress.EagerCompressBackend"
    CUSTOM = None


class MLACacheBackendEnum(BackendEnum, role=Role.CACHE):
    EAGER = "mla_conformance.backends.eager_cache.EagerCacheBackend"
    VLLM_CACHE = "mla_conformance.backends.vllm_cache.VllmCacheBackend"
    SGLANG_TRITON_CACHE = "mla_conformance.backends.sglang_triton_cache.SGLangTritonCacheBackend", "interpreted"
    CUSTOM = None


class MLASparseLayerBackendEnum(BackendEnum, role=Role.SPARSE_LAYER):
    EAGER = "mla_conformance.backends.eager_sparse_layer.EagerSparseLayerBackend"
    VLLM_SPARSE_LAYER = "mla_conformance.backends.vllm_sparse_layer.VllmSparseLayerBackend", "flash-attn"
    SGLANG_DSA = (
        "mla_conformance.backends.sglang_dsa.SGLangDSABackend",
        "fa3",
        "triton_sparse_mla",
        "triton",
        "flashmla_sparse",
    )
    CUSTOM = None


class MLATreeBackendEnum(BackendEnum, role=Role.TREE):
    EAGER = "mla_conformance.backends.eager_decode.EagerTreeBackend"
    TORCH_SDPA_TREE = "mla_conformance.backends.torch_rows.TorchSDPATreeBackend"
    SGLANG_TRITON_TREE = "mla_conformance.backends.sglang_triton_tree.SGLangTritonTreeBackend", "interpreted"
    FLASHINFER_TREE = "mla_conformance.backends.flashinfer_tree.FlashInferTreeBackend"
    CUSTOM = None


ENUMS = tuple(BackendEnum.__subclasses__())
"""The enumerations of all roles."""


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object at ``package.module.Name``; ImportError without such a module, or such a name in it."""
    module, _, name = qualname.rpartition(".")
    loaded = import_module(module)
    if not hasattr(loaded, name):
        raise ImportError(f"module {module} has no '{name}'", name=module)
    return getattr(loaded, name)


def register_mla_prefill_backend(backend: BackendEnum, class_path: str | None = None) -> Callable[[type], type]:
    """Register or override a member's class, by its path ``package.module.Class`` or as a decorator of it.

    The same stands under a name for each role.
    """

    def decorator(cls: type) -> type:
        backend.override(f"{cls.__module__}.{cls.__qualname__}")
        return cls

    if class_path is None:
        return decorator
    backend.override(class_path)
    return lambda cls: cls


register_mla_decode_backend = register_mla_sparse_backend = register_mla_indexer_backend = register_mla_prefill_backend
register_mla_topk_backend = register_mla_prepare_backend = register_mla_compress_backend = register_mla_prefill_backend
register_mla_cache_backend = register_mla_sparse_layer_backend = register_mla_prefill_backend
register_mla_tree_backend = register_mla_prefill_backend
