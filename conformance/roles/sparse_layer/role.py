"""What the role sparse_layer is: how its classes are validated and made, and what they are judged by."""

from typing import Any

import torch

from mla_conformance.backends.prepare import IndexPreparation
from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse_layer import MLASparseLayerConfig
from mla_conformance.roles.definition import RoleDefinition, validated
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase
from mla_conformance.roles.sparse_layer.judge import SparseLayerJudge
from mla_conformance.roles.sparse_layer.problem import sparse_layer_problem
from mla_conformance.roles.sparse_layer.weights import EPSILON


def _config(case: SparseLayerCase, dtype: torch.dtype) -> MLASparseLayerConfig:
    head = case.dimensions
    return MLASparseLayerConfig(
        dtype=dtype,
        num_heads=case.heads,
        scale=case.softmax_scale,
        qk_nope_head_dim=head.qk_nope_head_dim,
        qk_rope_head_dim=head.qk_rope_head_dim,
        v_head_dim=head.v_head_dim,
        kv_lora_rank=case.kv_lora_rank,
        is_neox_style=case.layer_pairs == "halves",
        rms_norm_eps=EPSILON,
        preparation=IndexPreparation(
            head_dim=INDEX_DIM,
            rope_dim=head.qk_rope_head_dim,
            rope_first=not case.rope_last,
            is_neox_style=case.pairs == "halves",
            hadamard=False,
            scale_format=case.index_scales,
            fold_scales=True,
            eps=EPSILON,
        ),
        index_n_heads=case.index_heads,
        topk_tokens=case.topk,
        skip_topk=case.shared,
        kv_cache_dtype=case.cache,
        tile_scales=case.scales,
        index_kv_cache_dtype=case.index_cache,
        block_size=case.page,
    )


def _kernel(kernel: Any, case: SparseLayerCase, dtype: torch.dtype, *_: Any) -> Any:
    """A new layer of the sizes and conventions of ``case``."""
    return kernel(_config(case, dtype), vllm_config=None)


SPARSE_LAYER = RoleDefinition(
    role=Role.SPARSE_LAYER,
    problem=sparse_layer_problem,
    kernel=_kernel,
    reasons=validated(_config),
    judge=SparseLayerJudge,
)
