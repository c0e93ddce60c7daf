"""What the role compress is: how its classes are validated and made, and what they write is judged by."""

from typing import Any

import torch

from mla_conformance.backends.compress import Compression, MLACompressSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.roles.cache.judge import CacheJudge, golden_bytes
from mla_conformance.roles.compress.case import CompressCase
from mla_conformance.roles.compress.problem import EPS, compress_problem, input_dtype
from mla_conformance.roles.definition import RoleDefinition, validated


def _compression(case: CompressCase) -> Compression:
    return Compression(
        head_dim=case.head_dim,
        rope_dim=case.rope_dim,
        ratio=case.ratio,
        overlap=case.overlap,
        norm=case.norm,
        eps=EPS,
    )


def _config(case: CompressCase, dtype: torch.dtype) -> MLACompressSelectorConfig:
    return MLACompressSelectorConfig(dtype, input_dtype(case, dtype), _compression(case), case.page, case.state_page)


def _kernel(kernel: Any, case: CompressCase, *_: Any) -> Any:
    """A new instance for the conventions of ``case``."""
    return kernel(compression=_compression(case), vllm_config=None)


COMPRESS = RoleDefinition(
    role=Role.COMPRESS,
    problem=compress_problem,
    kernel=_kernel,
    reasons=validated(_config),
    golden=golden_bytes,
    judge=CacheJudge,
)
