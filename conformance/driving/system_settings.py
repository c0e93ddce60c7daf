"""Settings of Python and of the operating system that a call must leave as they are; one more is one line."""

import contextlib
import ctypes
import locale
import os
import platform
import resource
import signal
import sys
import time
import warnings
from _signal import getsignal  # type: ignore[import-not-found]
from pathlib import Path
from typing import Any

import numpy as np

from mla_conformance.driving.torch_settings import Setting, each_from_to

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


def describe_left(name: str, before: frozenset[int], now: frozenset[int]) -> str:
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


_ENVIRONMENT_BYTES = 64
_CONTROL = 28
"""Where MXCSR stands in C's ``fenv_t`` of x86-64, 4 bytes."""
_STICKY = 0x3F
"""Bits that record what happened, which every inexact result sets."""


def _library() -> Any:
    """C's functions, where the layout of their environment is known."""
    library = ctypes.CDLL(None) if platform.system() == "Linux" and platform.machine() == "x86_64" else None
    return library if hasattr(library, "fegetenv") else None


_LIBRARY = _library()


def _floating_point() -> Any:
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _LIBRARY.fegetenv(environment)
    return environment


def read_control() -> str:
    """The control bits in hexadecimal; 0x1f80 rounds to nearest and keeps denormals. Empty where they are not known."""
    if _LIBRARY is None:
        return ""
    return hex(int.from_bytes(_floating_point()[_CONTROL : _CONTROL + 4], "little") & ~_STICKY)


def restore_control(control: str) -> None:
    """Set the control bits to what :func:`read_control` said."""
    environment = _floating_point()
    environment[_CONTROL : _CONTROL + 4] = int(control, 16).to_bytes(4, "little")
    _LIBRARY.fesetenv(environment)


_CATCHABLE = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_SIGNALS = {str(getattr(number, "name", number)): int(number) for number in _CATCHABLE}
_TIMERS = {name: getattr(signal, name) for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")}
_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text, as it is printed
    except FileNotFoundError:
        return "(removed)"


def _handlers() -> dict[str, Any]:
    """The handler of each signal; the function under that of ``signal``, which takes twenty times as long."""
    return dict(zip(_SIGNALS, map(getsignal, _SIGNALS.values()), strict=True))


def _set_handlers(old: dict[str, Any]) -> None:
    now = _handlers()
    for name, handler in old.items():
        if now[name] is not handler and handler is not None:
            signal.signal(_SIGNALS[name], handler)


def _timers() -> dict[str, str]:
    """Whether each timer runs; how long it still runs changes by itself."""
    return {name: "running" if signal.getitimer(number)[0] else "off" for name, number in _TIMERS.items()}


def _stop_timers(old: dict[str, str]) -> None:
    for name, state in old.items():
        if state == "off":
            signal.setitimer(_TIMERS[name], 0)


def _limits() -> dict[str, tuple[int, int]]:
    """Soft and hard limit of each resource."""
    return {name: resource.getrlimit(number) for name, number in _LIMITS.items()}


def _set_limits(old: dict[str, tuple[int, int]]) -> None:
    """The soft limits as far as the hard ones allow; a hard one that was lowered stays, unless for a superuser."""
    for name, limits in old.items():
        try:
            resource.setrlimit(_LIMITS[name], limits)
        except (ValueError, OSError):
            hard = resource.getrlimit(_LIMITS[name])[1]
            resource.setrlimit(_LIMITS[name], (hard, hard))


def _mask() -> str:
    mask = os.umask(0o77)
    os.umask(mask)
    return f"{mask:#o}"


def _describe_missing(name: str, old: list[str], now: list[str]) -> str:
    """A library may add entries."""
    gone = [path for path in old if path not in now]
    return f"{name} without {', '.join(gone)}" if gone else ""


def _set_path(old: list[str]) -> None:
    sys.path[:] = [*old, *(path for path in sys.path if path not in old)]


def _filters() -> tuple[list[Any], int]:
    """The filters, and how many modules are loaded: one that is imported may add some."""
    return list(warnings.filters), len(sys.modules)


def _describe_filters(name: str, old: tuple[list[Any], int], now: tuple[list[Any], int]) -> str:
    came = [entry for entry in now[0] if entry not in old[0]]
    if len(now[0]) == len(old[0]) + len(came) and now[1] > old[1]:
        return ""
    return "" if old[0] == now[0] else f"{name} from {len(old[0])} to {len(now[0])}, new: {came}"


def _set_filters(old: tuple[list[Any], int]) -> None:
    warnings.filters[:] = old[0]  # type: ignore[index]
    with warnings.catch_warnings():  # which tells the interpreter that they changed
        pass


def _environment() -> dict[bytes, bytes]:
    """The variables without the decoding of each, which would take as long as everything else here."""
    return dict(vars(os.environ)["_data"])


def _describe_lost(name: str, old: dict[bytes, bytes], now: dict[bytes, bytes]) -> str:
    """At its first use a library may add variables, and extend others such as a search path."""
    lost = [os.fsdecode(variable) for variable, value in old.items() if value not in now.get(variable, b"")]
    return f"{name} {', '.join(lost)}" if lost else ""


def _set_environment(old: dict[bytes, bytes]) -> None:
    now = _environment()
    os.environb.update({name: value for name, value in old.items() if value not in now.get(name, b"")})


SYSTEM_SETTINGS: tuple[Setting, ...] = (
    Setting("handler of", _handlers, _set_handlers, each_from_to),
    Setting("timer", _timers, _stop_timers, each_from_to),
    Setting("resource limit", _limits, _set_limits, each_from_to),
    Setting("floating-point control (rounding, denormals)", read_control, restore_control),
    Setting("umask", _mask, lambda old: os.umask(int(old, 8))),
    Setting("working directory", _directory, os.chdir),
    Setting("sys.path", lambda: list(sys.path), _set_path, _describe_missing),
    Setting("warning filters", _filters, _set_filters, _describe_filters),
    Setting("locale", lambda: locale.setlocale(locale.LC_ALL), lambda old: locale.setlocale(locale.LC_ALL, old)),
    Setting("error handling of numpy", np.geterr, lambda old: np.seterr(**old)),
    Setting("environment variable", _environment, _set_environment, _describe_lost),
    Setting("left", children, end_left, describe_left),
)
