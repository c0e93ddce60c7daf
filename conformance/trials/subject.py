"""The backend under test: its class in each role, and what it and its device support."""

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch

from mla_conformance.backends import declaration, graph_support, references
from mla_conformance.backends.kernel import get_device_capability
from mla_conformance.backends.loading import resolve_backend, roles_of, unavailable_reasons
from mla_conformance.backends.roles import Role
from mla_conformance.cases import work
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import IN_PROCESS, Executor
from mla_conformance.judging import golden
from mla_conformance.problems import memory, operands
from mla_conformance.roles.definition import DEFINITIONS
from mla_conformance.vocabulary.capabilities import DUE_ON_GPU, find_capability, is_due_on_gpu

_GIB = 2**30
_KERNELS_OF_LAYERS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class Subject:
    backend: references.BackendReference  # names it
    device: torch.device  # where it is judged
    executor: Executor = IN_PROCESS  # carries out whatever imports it, asks it or calls it
    _classes: dict[Role, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _declared: dict[Role, declaration.Declaration] = field(default_factory=dict, init=False, repr=False, compare=False)
    _missing: dict[Role, list[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(reference: str, device: torch.device, executor: Executor = IN_PROCESS) -> "Subject":
        return Subject(references.parse_reference(reference), device, executor)

    def __reduce__(self) -> tuple[Any, ...]:
        """In the process that imports it, it is one object for all steps."""
        return _here, (self.backend.reference, self.device)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """What the backend computes; kernels for prefill and decode make a layer."""
        roles = roles_of(self.backend)
        composed = set(_KERNELS_OF_LAYERS) <= set(roles) and Role.LAYER not in roles
        return (*roles, Role.LAYER) if composed else roles

    def class_of(self, role: Role) -> Any:
        """The class that calls of a role go to on this device; of a layer the common one, unless one is named."""
        if role not in self._classes:  # what names it is looked up in files
            named = resolve_backend(self.backend, get_device_capability(self.device), role)
            if role is Role.LAYER and not named:
                from mla_conformance.backends.layer.mla_layer import mla_backend  # with all that only layers need

                named = mla_backend(*map(self.class_of, _KERNELS_OF_LAYERS))
            self._classes[role] = named
        return self._classes[role]

    def declared(self, role: Role) -> declaration.Declaration:
        if role not in self._declared:
            self._declared[role] = declaration.declaration_of(self.class_of(role))
        return self._declared[role]

    @property
    def declarations(self) -> dict[str, declaration.Declaration]:
        return {str(role): self.declared(role) for role in self.roles if not self.missing_role(role)}

    @cached_property
    def unavailable(self) -> list[str]:
        return unavailable_reasons(self.backend, get_device_capability(self.device))

    def missing_role(self, role: Role) -> list[str]:
        """Why no call of a role can be made: the backend has other roles only, or this one cannot run here."""
        if role not in self.roles:
            return [f"{' and '.join(self.roles)} only"]
        if role not in self._missing:  # what it needs is looked for in files
            named, capability = roles_of(self.backend), get_device_capability(self.device)
            needed = (role,) if role in named else named  # of a layer that the others make
            reasons = [reason for each in needed for reason in unavailable_reasons(self.backend, capability, each)]
            self._missing[role] = [f"{role} unavailable: {'; '.join(reasons)}"] if reasons else []
        return self._missing[role]

    def unsupported(self, case: Case) -> list[str]:
        if missing := self.missing_role(case.role):
            return missing
        dtype = operands.TORCH_DTYPES[case.dtype]
        needs = find_capability(case.capability).needs
        if needs and not getattr(self.declared(case.role), needs):
            return [f"not declared {needs}"]
        kernel = self.class_of(case.role)
        reasons = DEFINITIONS[case.role].reasons(kernel, case, dtype, get_device_capability(self.device))
        return reasons or device_reasons(case, self.device, kernel)

    def create(self, case: Case) -> Any:
        dtype = operands.TORCH_DTYPES[case.dtype] or torch.bfloat16
        return DEFINITIONS[case.role].kernel(self.class_of(case.role), case, dtype, self.device)


@cache
def _here(reference: str, device: torch.device) -> Subject:
    return Subject.of(reference, device)


def device_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    capability = find_capability(case.capability)
    if capability.needs_cuda and device.type != "cuda":
        return ["needs a CUDA device"]
    if device.type == "cpu" and is_due_on_gpu(case):
        most = work.LARGE_CPU_WORK if capability.large else work.CPU_WORK
        what = f"{work.work_of(case):.2g} operations, a CPU is asked for {most:.2g}"
        return [f"{DUE_ON_GPU}: {'so many rows are computed there' if case.far.startswith('rows') else what}"]
    if capability.captures:
        return _graph_reasons(case, device, backend_class)
    # What others hold of a device at the moment is no reason: a trial waits for it.
    if case.far == "none" or device.type != "cuda":
        return []
    needed, whole = golden.needed_bytes(case), memory.whole_memory(device)
    lacking = f"needs a device with {needed / _GIB:.0f} GiB of memory, this one has {whole / _GIB:.0f} GiB"
    return [lacking] if needed > whole else []


def _graph_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    if getattr(case, "ranks", 1) > 1 or getattr(case, "tp", 1) > 1:
        return ["graphs are captured on one rank only"]
    if case.role in (Role.LAYER, Role.SPARSE_LAYER) and device.type != "cuda":
        return []  # replayed as a call over the same buffers
    needed = graph_support.AttentionCGSupport.UNIFORM_BATCH
    if case.role is Role.PREFILL:
        needed = graph_support.AttentionCGSupport.ALWAYS
    elif case.role is Role.LAYER or max(case.q) == 1:
        needed = graph_support.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    declared = getattr(backend_class, "cudagraph_support", graph_support.AttentionCGSupport.NEVER)
    if case.role is Role.LAYER:
        declared = backend_class.get_builder_cls().get_cudagraph_support(None, None)
    if declared.value >= needed.value:
        return []
    return [f"CUDA graphs of such a batch not declared (cudagraph_support {declared.name}, needed {needed.name})"]
