"""What the role decode is: how its classes are validated and made."""

from typing import Any

import torch

from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.decode.problem import decode_problem
from mla_conformance.roles.definition import RoleDefinition, kernel_sizes, validated


def decode_config(case: CachedCase, dtype: torch.dtype, lse: bool) -> MLADecodeSelectorConfig:
    """What the decodes of a case ask of a backend: of all of its requests, or of some of a layer's batch.

    Args:
        case: gives lengths, cache and ranks, whose states are merged by their LSE.
        dtype: of the model.
        lse: whether the LSE is asked for where there is one rank.
    """
    queries = case.decode_queries
    return MLADecodeSelectorConfig(
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        max_query_len=max(queries),
        uniform=len(set(queries)) == 1,
        dcp_world_size=case.ranks,
        tile_scales=case.scales,
        lse=lse or case.ranks > 1,
    )


def _config(case: DecodeCase, dtype: torch.dtype) -> MLADecodeSelectorConfig:
    return decode_config(case, dtype, case.lse)


def decode_kernel(kernel: Any, case: DecodeCase, *_: Any) -> Any:
    """A new instance for the head dims, the scale and the cache of ``case``."""
    return kernel(**kernel_sizes(case), kv_cache_dtype=case.cache, vllm_config=None)


DECODE = RoleDefinition(role=Role.DECODE, problem=decode_problem, kernel=decode_kernel, reasons=validated(_config))
