"""Child processes that a call started and left running."""

import contextlib
import os
import signal
import time
from pathlib import Path

_PATIENCE = 2.0
"""Seconds for children to end by themselves: a forked one may be on its way."""
_OWN = Path("/proc/thread-self/children")
_SERVICES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker")
"""Parts of the command lines of helpers that Python and torch start once and keep for the life of the process."""


def children() -> frozenset[int]:
    """Child processes that this thread started, ended ones included, and those that an ended thread did.

    To ask every thread takes a millisecond once a library has a pool of them. None on a system that does not tell.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return frozenset()
    return frozenset(map(int, _read(_OWN).split()))


def tell_left(name: str, before: frozenset[int], now: frozenset[int]) -> str:
    """How many were left running, after a while to end in."""
    end = time.monotonic() + _PATIENCE
    while (left := _lasting(now - before)) and time.monotonic() < end:
        time.sleep(0.01)
    return f"{name} {len(left)} child process{'es' * (len(left) > 1)} running" if left else ""


def end_left(before: frozenset[int]) -> None:
    """Kill the children that were not there before."""
    for process in _lasting(children() - before):
        os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def _lasting(processes: frozenset[int]) -> list[int]:
    """Those that still run and are no service."""
    return [process for process in processes if _runs(process) and not _serves(process)]


def _runs(process: int) -> bool:
    state = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def _serves(process: int) -> bool:
    command = _read(Path(f"/proc/{process}/cmdline"))
    return any(service in command for service in _SERVICES)


def _read(path: Path) -> str:
    """A file of /proc; nothing of one that went."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
