"""When a process must not judge further cases: it lost its GPU, or memory that it does not get back."""

import gc
import sys
from enum import IntEnum

import torch

from mla_conformance.isolation.limits import allocated_memory
from mla_conformance.judging.golden import forget
from mla_conformance.judging.verdict import Status, Verdict
from mla_conformance.problems.memory import device_lost, free_memory
from mla_conformance.trials.execute import failing

_ENOUGH = 7 / 8
"""Share of a GPU's memory that has to be free again after a case that there was not enough for."""


class Retirement(IntEnum):
    """Why a process ends, as its exit status."""

    DEVICE_LOST = 70
    OUT_OF_MEMORY = 71


def retirement(device: torch.device, verdict: Verdict, limit: int | None) -> Retirement | None:
    """Why this process has to end after a trial, when nothing refers to the trial any more; None if it may go on.

    Args:
        device: where the trial ran.
        verdict: its verdict.
        limit: bytes of memory that the process may allocate; None where there is no limit.
    """
    if device_lost(device):
        return Retirement.DEVICE_LOST
    lacking = verdict.status is Status.UNAVAILABLE
    if lacking or failing(verdict):
        forget()  # a wrong kernel may have written anywhere, and the next backend must not answer for it
    # What one case leaked must not be missing to the next.
    crowded = limit is not None and 2 * allocated_memory() > limit
    return Retirement.OUT_OF_MEMORY if crowded or (lacking and not _is_free_again(device)) else None


def _is_free_again(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)  # pytest keeps the last exception for a debugger, and with it the frames of a call
    gc.collect()
    return free_memory(device) >= _ENOUGH * torch.cuda.get_device_properties(device).total_memory
