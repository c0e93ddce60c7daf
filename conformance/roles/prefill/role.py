"""What the role prefill is: how its classes are validated and made."""

from typing import Any

import torch

from mla_conformance.backends.declaration import NO_LSE
from mla_conformance.backends.foreign import yes_or_no
from mla_conformance.backends.interface import MLAPrefillSelectorConfig
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.backends.roles import Role
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.prefill.problem import PrefillBatch


class _Prefill(RoleDefinition):
    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        """What configurations do not say is asked of the class by itself."""
        reasons = super().reasons(kernel, case, dtype, capability)
        if (case.lse or case.has_context) and not getattr(kernel, "returns_lse", True):
            reasons.append(NO_LSE)
        if case.own_merge and not hasattr(kernel, "merge_attn_states"):
            reasons.append("no merge_attn_states of its own")
        if case.quant == "none":
            declared = getattr(kernel, "supports_unquantised_output", lambda dtype: True)
            if not yes_or_no(declared(dtype), "supports_unquantised_output"):
                reasons.append(f"unquantised output of {dtype} not declared")
        if case.quant == "fp8" and not reasons:
            try:
                key = fp8_static_tensor_sym()
            except ValueError as error:
                return [str(error)]
            if not self.kernel(kernel, case, dtype, torch.device("cpu")).supports_quant_output(key):
                reasons.append("fused e4m3 output not declared")
        return reasons


PREFILL = _Prefill(role=Role.PREFILL, batch=PrefillBatch, config=MLAPrefillSelectorConfig)
