"""A call over fenced operands; on a GPU, a fault loses the context, which whoever asked can see."""

from collections.abc import Callable
from typing import Any

import torch

from mla_conformance.driving.driver import call_once
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.cpu_room import noted_faults
from mla_conformance.problems.fences import Fence, FencedCall
from mla_conformance.problems.memory import Guarded, device_lost


class OutOfBoundsError(Exception):
    """A call that touched what lies beside an operand."""


def call_fenced(
    fence: Fence,
    first: Callable[[], None],
    backend: Any,
    call: KernelCall,
    out: Guarded | None,
    prepare: bool,
    device: torch.device,
) -> Any:
    """As :func:`call_once`, over operands in fenced memory.

    Raises:
        OutOfBoundsError: something beside an operand was touched; its message says which and how.
    """
    fenced = FencedCall(fence, call, out)
    try:
        with noted_faults():
            value = call_once(first, backend, fenced.call, fenced.out, prepare, device)
    finally:
        # What touched something may have raised because of what it found there.
        if beyond := [] if device_lost(device) else list(fenced.settle()):
            raise OutOfBoundsError("; ".join(beyond))
    return fenced.handed_back(value, out)
