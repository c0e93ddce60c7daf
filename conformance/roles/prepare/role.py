"""What the role prepare is: how its classes are validated and made, and what their codes are judged by."""

from typing import Any

import torch

from mla_conformance.backends.prepare import IndexPreparation, MLAPrepareSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.roles.definition import RoleDefinition, validated
from mla_conformance.roles.prepare.case import PrepareCase
from mla_conformance.roles.prepare.judge import PrepareJudge, golden_prepared
from mla_conformance.roles.prepare.problem import prepare_problem


def _preparation(case: PrepareCase) -> IndexPreparation:
    return IndexPreparation(
        head_dim=case.head_dim,
        rope_dim=case.rope_dim,
        rope_first=not case.rope_last,
        is_neox_style=case.pairs == "halves",
        hadamard=case.hadamard,
        scale_format=case.scales,
        fold_scales=case.fold,
        eps=case.norm_eps,
    )


def _config(case: PrepareCase, dtype: torch.dtype) -> MLAPrepareSelectorConfig:
    return MLAPrepareSelectorConfig(dtype=dtype, num_heads=case.heads, preparation=_preparation(case))


def _kernel(kernel: Any, case: PrepareCase, *_: Any) -> Any:
    """A new instance for the heads and conventions of ``case``."""
    scale, preparation = case.softmax_scale, _preparation(case)
    return kernel(num_heads=case.heads, scale=scale, preparation=preparation, vllm_config=None)


PREPARE = RoleDefinition(
    role=Role.PREPARE,
    problem=prepare_problem,
    kernel=_kernel,
    reasons=validated(_config),
    golden=golden_prepared,
    judge=PrepareJudge,
)
