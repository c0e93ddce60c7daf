"""What the role indexer is: how its classes are validated and made, and what its scores are judged by."""

from typing import Any

import torch

from mla_conformance.backends.indexer import MLAIndexerSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call
from mla_conformance.roles.definition import RoleDefinition, validated
from mla_conformance.roles.indexer.case import IndexerCase
from mla_conformance.roles.indexer.judge import IndexJudge, golden_scores
from mla_conformance.roles.indexer.problem import indexer_problem


def _config(case: IndexerCase, dtype: torch.dtype) -> MLAIndexerSelectorConfig:
    return MLAIndexerSelectorConfig(
        call="logits" if case.call == Call.INDEX_LOGITS else "topk",
        paged=case.is_paged,
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page if case.is_paged else 1,
        num_heads=case.heads,
        head_dim=case.head_dim,
        topk_tokens=case.topk,
        index_space=case.space,
    )


def _kernel(kernel: Any, case: IndexerCase, *_: Any) -> Any:
    """A new instance for the heads and the keys of ``case``."""
    return kernel(num_heads=case.heads, head_dim=case.head_dim, kv_cache_dtype=case.cache, vllm_config=None)


INDEXER = RoleDefinition(
    role=Role.INDEXER,
    problem=indexer_problem,
    kernel=_kernel,
    reasons=validated(_config),
    golden=golden_scores,
    judge=IndexJudge,
)
