"""What the role prefill is: how its classes are validated and made."""

from typing import Any

import torch

from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.foreign import reasons_of, yes_or_no
from mla_conformance.backends.interface import MLAPrefillBackend, MLAPrefillSelectorConfig
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.roles.definition import RoleDefinition, kernel_sizes
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.roles.prefill.problem import prefill_problem


def prefill_config(case: Case, dtype: torch.dtype) -> MLAPrefillSelectorConfig:
    """What the prefills of a case ask of a backend, in the form that it is validated against."""
    return MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=case.dimensions)


def prefill_kernel(kernel: type[MLAPrefillBackend], case: Case, *_: Any) -> MLAPrefillBackend:
    """A new instance for the head dims and the scale of ``case``."""
    return kernel(**kernel_sizes(case), vllm_config=None)


def _reasons(
    kernel: type[MLAPrefillBackend], case: PrefillCase, dtype: torch.dtype, capability: DeviceCapability | None
) -> list[str]:
    """What of ``case`` a prefill class declares unsupported."""
    reasons = reasons_of(kernel.validate_configuration(capability, prefill_config(case, dtype)))
    if (case.lse or case.has_context) and not getattr(kernel, "returns_lse", True):
        reasons.append(NO_LSE)
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


def _writes_unquantised(kernel: Any, dtype: torch.dtype) -> bool:
    declared = getattr(kernel, "supports_unquantised_output", lambda dtype: True)
    return yes_or_no(declared(dtype), "supports_unquantised_output")


PREFILL = RoleDefinition(role=Role.PREFILL, problem=prefill_problem, kernel=prefill_kernel, reasons=_reasons)
