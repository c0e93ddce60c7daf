"""What the role topk is: how its classes are validated and made, and what their selections are judged by."""

from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.backends.topk import MLATopKSelectorConfig
from mla_conformance.roles.definition import RoleDefinition, validated
from mla_conformance.roles.topk.case import TopKCase
from mla_conformance.roles.topk.judge import TopKJudge, golden_windows
from mla_conformance.roles.topk.problem import topk_problem


def _config(case: TopKCase, dtype: torch.dtype) -> MLATopKSelectorConfig:
    return MLATopKSelectorConfig(dtype=dtype, topk_tokens=case.topk, row_starts=case.packed, pool=case.pool)


def _reasons(kernel: Any, case: TopKCase, *known: Any) -> list[str]:
    """What a class declares, which may know of no pools."""
    if case.pool > 1 and not getattr(kernel, "supports_pools", False):
        return ["columns of several tokens not declared (supports_pools)"]
    return validated(_config)(kernel, case, *known)


def _kernel(kernel: Any, *_: Any) -> Any:
    """A new instance, which is for rows and columns of any number."""
    return kernel(vllm_config=None)


TOPK = RoleDefinition(
    role=Role.TOPK,
    problem=topk_problem,
    kernel=_kernel,
    reasons=_reasons,
    golden=golden_windows,
    judge=TopKJudge,
)
