"""What the role cache is: how its classes are validated and made, and what its writes are judged by."""

from typing import Any

import torch

from mla_conformance.backends.cache import MLACacheSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.roles.cache.case import CacheCase
from mla_conformance.roles.cache.judge import CacheJudge, golden_bytes
from mla_conformance.roles.cache.problem import SLOT_DTYPES, cache_problem
from mla_conformance.roles.definition import RoleDefinition, validated


def _config(case: CacheCase, dtype: torch.dtype) -> MLACacheSelectorConfig:
    return MLACacheSelectorConfig(
        call=case.call,
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        tile_scales=case.scales,
        slot_dtype=SLOT_DTYPES[case.slots],
        dequantise=case.dequantise,
        compress_ratio=case.ratio,
        dcp_world_size=case.ranks,
        outside=case.outside,
    )


def _kernel(kernel: Any, case: CacheCase, *_: Any) -> Any:
    """A new instance for the entries of ``case``."""
    return kernel(
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        kv_cache_dtype=case.cache,
        tile_scales=case.scales,
        vllm_config=None,
    )


CACHE = RoleDefinition(
    role=Role.CACHE,
    problem=cache_problem,
    kernel=_kernel,
    reasons=validated(_config),
    golden=golden_bytes,
    judge=CacheJudge,
)
