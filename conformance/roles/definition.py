"""What a role is: one value, from which everything that differs between roles is taken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.backends.declaration import Declaration, declaration_of
from mla_conformance.backends.foreign import reasons_of
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import Golden, golden_attention
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.steps import Steps
from mla_conformance.problems.problem import Problem

Reasons = Callable[[Any, Any, torch.dtype, DeviceCapability | None], list[str]]


@dataclass(frozen=True, kw_only=True)
class RoleDefinition:
    """A role; by default one that asks for attention.

    Attributes:
        role: its name.
        problem: makes the inputs of a case on a device, drawn with a salt beside the case.
        kernel: an instance of a class for a case, its dtype and its device.
        reasons: what of a case a class declares unsupported, whatever the device has.
        declared: what a class declares.
        golden: the result that is expected of a problem.
        judge: the steps of its verdicts.
    """

    role: Role
    problem: Callable[[Any, torch.device, str], Problem]
    kernel: Callable[[Any, Any, torch.dtype, torch.device], Any]
    reasons: Reasons
    declared: Callable[[Any], Declaration] = declaration_of
    golden: Callable[[Problem], Golden] = golden_attention
    judge: Callable[..., Steps] = AttentionJudge


def validated(config: Callable[[Any, torch.dtype], Any]) -> Reasons:
    """The reasons of a role whose classes judge a case by its configuration alone."""

    def reasons(kernel: Any, case: Case, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        return reasons_of(kernel.validate_configuration(capability, config(case, dtype)))

    return reasons


def kernel_sizes(case: Case) -> dict[str, Any]:
    """The arguments that the constructors of attention kernels have in common."""
    dims = case.dimensions
    return {
        "num_heads": case.heads,
        "scale": case.softmax_scale,
        "kv_lora_rank": case.kv_lora_rank,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "v_head_dim": dims.v_head_dim,
    }
