"""What the class of a kernel supports of a case, and an instance of it."""

from typing import Any

import torch

from mla_conformance.backends.foreign import reasons_of, yes_or_no
from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.cases.case import Case
from mla_conformance.cases.decode import DecodeCase
from mla_conformance.cases.indexer import IndexerCase
from mla_conformance.cases.prefill import PrefillCase
from mla_conformance.cases.sparse import SparseCase
from mla_conformance.driving.selector_config import decode_config, indexer_config, prefill_config, sparse_config


def prefill_reasons(
    kernel: type[MLAPrefillBackend], case: PrefillCase, dtype: torch.dtype, capability: DeviceCapability | None
) -> list[str]:
    """What of ``case`` a prefill class declares unsupported."""
    reasons = reasons_of(kernel.validate_configuration(capability, prefill_config(case, dtype)))
    if (case.lse or case.has_context) and not getattr(kernel, "returns_lse", True):
        reasons.append("LSE not declared")
    if case.own_merge and not hasattr(kernel, "merge_attn_states"):
        reasons.append("no merge_attn_states of its own")
    if case.quant == "none" and not _writes_unquantised(kernel, dtype):
        reasons.append(f"unquantised output of {dtype} not declared")
    if case.quant == "fp8" and not reasons:
        try:
            key = fp8_static_tensor_sym()
        except ValueError as error:
            return [str(error)]
        if not prefill_kernel(kernel, case).supports_quant_output(key):
            reasons.append("fused e4m3 output not declared")
    return reasons


def decode_reasons(kernel: Any, case: DecodeCase, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
    """What of ``case`` a decode class declares unsupported."""
    return reasons_of(kernel.validate_configuration(capability, decode_config(case, dtype)))


def prefill_kernel(kernel: type[MLAPrefillBackend], case: Case) -> MLAPrefillBackend:
    """A new instance for the head dims and the scale of ``case``."""
    return kernel(**_sizes(case), vllm_config=None)


def decode_kernel(kernel: Any, case: DecodeCase) -> Any:
    """A new instance for the head dims, the scale and the cache of ``case``."""
    return kernel(**_sizes(case), kv_cache_dtype=case.cache, vllm_config=None)


def sparse_reasons(kernel: Any, case: SparseCase, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
    """What of ``case`` a sparse class declares unsupported."""
    return reasons_of(kernel.validate_configuration(capability, sparse_config(case, dtype)))


def sparse_kernel(kernel: Any, case: SparseCase) -> Any:
    """A new instance for the head dims, the scale and the caches of ``case``."""
    extra = {"extra_kv_cache_dtype": case.extra} if case.has_extra else {}
    return kernel(**_sizes(case), kv_cache_dtype=case.cache, vllm_config=None, **extra)


def indexer_reasons(
    kernel: Any, case: IndexerCase, dtype: torch.dtype, capability: DeviceCapability | None
) -> list[str]:
    """What of ``case`` an indexer's class declares unsupported."""
    return reasons_of(kernel.validate_configuration(capability, indexer_config(case, dtype)))


def indexer_kernel(kernel: Any, case: IndexerCase) -> Any:
    """A new instance for the heads and the keys of ``case``."""
    return kernel(num_heads=case.heads, head_dim=case.head_dim, kv_cache_dtype=case.cache, vllm_config=None)


def _writes_unquantised(kernel: Any, dtype: torch.dtype) -> bool:
    declared = getattr(kernel, "supports_unquantised_output", lambda dtype: True)
    return yes_or_no(declared(dtype), "supports_unquantised_output")


def _sizes(case: Case) -> dict[str, Any]:
    """The arguments that the constructors of all roles have in common."""
    dims = case.dimensions
    return {
        "num_heads": case.heads,
        "scale": case.softmax_scale,
        "kv_lora_rank": case.kv_lora_rank,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "v_head_dim": dims.v_head_dim,
    }
