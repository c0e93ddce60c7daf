"""What a case needs of the device beyond the backend's own requirements, as reasons for a report."""

from typing import Any

import torch

from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.judging.needs import needed_bytes
from mla_conformance.vocabulary.capabilities import find_capability

_GIB = 2**30


def device_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    """Why a case cannot be judged on ``device``; an empty list means that it can."""
    capability = find_capability(case.capability)
    if capability.needs_cuda and device.type != "cuda":
        return ["needs a CUDA device"]
    if capability.captures:
        return _graph_reasons(case, device, backend_class)
    return _memory_reasons(case, device) if case.far != "none" else []


def _graph_reasons(case: Case, device: torch.device, backend_class: Any) -> list[str]:
    if case.role is Role.LAYER:
        if device.type != "cuda":
            return []  # replayed as a call over the same buffers
        declared = backend_class.get_builder_cls().get_cudagraph_support(None, None)
        return _graph_support(declared, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    declared = getattr(backend_class, "cudagraph_support", AttentionCGSupport.NEVER)
    needed = AttentionCGSupport.UNIFORM_BATCH
    if case.role is Role.PREFILL:
        needed = AttentionCGSupport.ALWAYS
    elif max(case.q) == 1:
        needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return _graph_support(declared, needed)


def _graph_support(declared: AttentionCGSupport, needed: AttentionCGSupport) -> list[str]:
    if declared.value >= needed.value:
        return []
    return [f"CUDA graphs of such a batch not declared (cudagraph_support {declared.name}, needed {needed.name})"]


def _memory_reasons(case: Case, device: torch.device) -> list[str]:
    """What others hold of a device at the moment is no reason: a trial waits for it."""
    needed, whole = needed_bytes(case), torch.cuda.get_device_properties(device).total_memory
    if whole >= needed:
        return []
    return [f"needs a device with {needed / _GIB:.0f} GiB of memory, this one has {whole / _GIB:.0f} GiB"]
