"""The backend under test: its class, its declaration, and what it supports."""

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mla_conformance.backends.declaration import Declaration, declaration_of
from mla_conformance.backends.interface import MLAPrefillBackend, MLAPrefillSelectorConfig
from mla_conformance.backends.loading import (
    BackendReference,
    parse_reference,
    resolve_backend,
    unavailable_reasons,
)
from mla_conformance.backends.platform import DeviceCapability, get_device_capability
from mla_conformance.backends.quant_key import fp8_static_tensor_sym
from mla_conformance.capabilities import find_capability
from mla_conformance.case import Case
from mla_conformance.problem import TORCH_DTYPES


@dataclass(frozen=True)
class Subject:
    """A backend on a device."""

    backend: BackendReference
    device: torch.device

    @staticmethod
    def of(reference: str, device: torch.device) -> "Subject":
        """The subject that ``reference`` names.

        Raises:
            BackendReferenceError: it names nothing that can be judged.
        """
        return Subject(parse_reference(reference), device)

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.backend.name

    @cached_property
    def backend_class(self) -> type[MLAPrefillBackend]:
        """The class under test, on this device."""
        return resolve_backend(self.backend, self.capability)

    @cached_property
    def declaration(self) -> Declaration:
        """What the adapter declares."""
        return declaration_of(self.backend_class)

    @cached_property
    def capability(self) -> DeviceCapability | None:
        """Compute capability of the device."""
        return get_device_capability(self.device)

    @cached_property
    def unavailable(self) -> list[str]:
        """Why the backend cannot run here at all."""
        return unavailable_reasons(self.backend, self.capability)

    def versions(self) -> dict[str, str]:
        """Versions of the distributions behind the backend."""
        found = {}
        for name in self.declaration.distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not installed as a distribution"
        return found

    def unsupported(self, case: Case) -> list[str]:
        """What of ``case`` the backend declares unsupported."""
        dtype = TORCH_DTYPES[case.dtype]
        if dtype is None:
            return [f"dtype {case.dtype} needs a torch with float8, this is {torch.__version__}"]
        config = MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=case.dimensions)
        reasons = list(self.backend_class.validate_configuration(self.capability, config))
        needs = find_capability(case.capability).needs
        if needs and not getattr(self.declaration, needs):
            reasons.append(f"not declared {needs}")
        if case.merge == "own" and not hasattr(self.backend_class, "merge_attn_states"):
            reasons.append("no merge_attn_states of its own")
        if case.quant == "fp8" and not reasons:
            try:
                key = fp8_static_tensor_sym()
            except ValueError as error:
                return [str(error)]
            if not self.create(case).supports_quant_output(key):
                reasons.append("fused e4m3 output not declared")
        return reasons

    def create(self, case: Case, vllm_config: Any = None) -> MLAPrefillBackend:
        """A new instance for the case's head dims and scale."""
        dims = case.dimensions
        return self.backend_class(
            num_heads=case.heads,
            scale=case.softmax_scale,
            kv_lora_rank=case.kv_lora_rank,
            qk_nope_head_dim=dims.qk_nope_head_dim,
            qk_rope_head_dim=dims.qk_rope_head_dim,
            v_head_dim=dims.v_head_dim,
            vllm_config=vllm_config,
        )
