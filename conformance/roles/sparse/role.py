"""What the role sparse is: how its classes are validated and made."""

from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.roles.definition import RoleDefinition, kernel_sizes, validated
from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.sparse.problem import sparse_problem


def _config(case: SparseCase, dtype: torch.dtype) -> MLASparseSelectorConfig:
    return MLASparseSelectorConfig(
        call="decode" if case.is_paged else "prefill",
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page if case.is_paged else 1,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        num_heads=case.heads,
        topk=case.topk,
        index_space=case.space,
        topk_length=case.length,
        sink=case.sink != "none",
        duplicates=case.repeats,
        lse=case.lse,
        extra_kv_cache_dtype=case.extra if case.has_extra else None,
        extra_block_size=case.extra_page if case.has_extra else 0,
        extra_topk=case.extra_topk if case.has_extra else 0,
        dcp_world_size=case.ranks,
        tile_scales=case.scales,
    )


def _kernel(kernel: Any, case: SparseCase, *_: Any) -> Any:
    """A new instance for the head dims, the scale and the caches of ``case``."""
    extra = {"extra_kv_cache_dtype": case.extra} if case.has_extra else {}
    return kernel(**kernel_sizes(case), kv_cache_dtype=case.cache, vllm_config=None, **extra)


SPARSE = RoleDefinition(role=Role.SPARSE, problem=sparse_problem, kernel=_kernel, reasons=validated(_config))
