"""Settings of Python and of the operating system that a call must leave as they are; one more is one line."""

import locale
import os
import resource
import signal
import sys
import warnings
from _signal import getsignal  # type: ignore[import-not-found]
from typing import Any

import numpy as np

from mla_conformance.driving.child_processes import children, end_left, tell_left
from mla_conformance.driving.floating_point import read_control, restore_control
from mla_conformance.driving.setting import Setting, each_from_to

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


def _tell_missing(name: str, old: list[str], now: list[str]) -> str:
    """A library may add entries."""
    gone = [path for path in old if path not in now]
    return f"{name} without {', '.join(gone)}" if gone else ""


def _set_path(old: list[str]) -> None:
    sys.path[:] = [*old, *(path for path in sys.path if path not in old)]


def _filters() -> tuple[list[Any], int]:
    """The filters, and how many modules are loaded: one that is imported may add some."""
    return list(warnings.filters), len(sys.modules)


def _tell_filters(name: str, old: tuple[list[Any], int], now: tuple[list[Any], int]) -> str:
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


def _tell_lost(name: str, old: dict[bytes, bytes], now: dict[bytes, bytes]) -> str:
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
    Setting("sys.path", lambda: list(sys.path), _set_path, _tell_missing),
    Setting("warning filters", _filters, _set_filters, _tell_filters),
    Setting("locale", lambda: locale.setlocale(locale.LC_ALL), lambda old: locale.setlocale(locale.LC_ALL, old)),
    Setting("error handling of numpy", np.geterr, lambda old: np.seterr(**old)),
    Setting("environment variable", _environment, _set_environment, _tell_lost),
    Setting("left", children, end_left, tell_left),
)
