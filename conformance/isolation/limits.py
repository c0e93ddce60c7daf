"""Limits of a worker: it does not outlive its run, and does not take the machine's memory with it. Linux has both."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_STATM = Path("/proc/self/statm")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def die_with_parent() -> None:
    """Have the system end this process when the one that started it ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(limit: int) -> None:
    """Let allocations beyond ``limit`` bytes fail in this process, rather than somewhere on the machine."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def allocated_memory() -> int:
    """Bytes of this process that :func:`limit_memory` counts."""
    return int(_STATM.read_text(encoding="ascii").split()[5]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else 0


def machine_memory() -> int:
    """Bytes of memory that this process and its siblings may use together."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(installed, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or one without a limit, which reads "max"
        return installed


def leave(status: int) -> NoReturn:
    """End this process at once; to take torch, libraries and a GPU's context apart takes an interpreter a second."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed
    os._exit(status)
