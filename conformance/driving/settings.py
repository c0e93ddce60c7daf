"""What a call must leave as it is (SPEC 3.6): a table of settings, the functions that others call, and the streams.

A library may add names and import modules; a name that hides an inherited one replaces it.
"""

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

from mla_conformance.files.places import read_if_there

_OWNERS: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, np)  # what functions are looked up in
_FOLLOWS = torch.Storage  # type: ignore[attr-defined] # which torch replaces when the default dtype changes
_PATIENCE = 2.0  # seconds for children to end by themselves: a forked one may be on its way
_SERVICES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker")
"""Parts of the command lines of helpers that Python and torch start once and keep for the life of the process."""
_LIBC: Any = ctypes.CDLL(None) if platform.system() == "Linux" and platform.machine() == "x86_64" else None
_ENVIRONMENT_BYTES, _CONTROL = 64, 28  # the size of C's ``fenv_t`` of x86-64, and where MXCSR stands in it, in 4 bytes
_STICKY = 0x3F  # bits of MXCSR that record what happened, which every inexact result sets
_STANDARD = (1, 2)
_MATMUL = torch.backends.cuda.matmul
_held: list[Any] = []  # modes that were entered to undo another: a mode ends with its object


class Setting(NamedTuple):
    name: str
    read: Callable[[], Any]  # its value now
    # puts back a value that was read; where there is no way a change is told only
    restore: Callable[[Any], object] = lambda old: None
    # of name, old value and another new one, what counts as a change, as a text; empty for none
    tell: Callable[[str, Any, Any], str] = lambda name, old, now: f"{name} from {old} to {now}"
    unreadable: str = "(unreadable)"  # stands for a value that cannot be read in the state that a call left


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Restore everything at the end of the block, and fill the list with what had changed.

    Functions come first, since those of torch restore the rest; a mode that was left entered must not see how the
    settings behind it are. Drawing from torch's generator is no change, a new seed is.
    """
    functions = [(owner, vars(owner).copy()) for owner in _OWNERS]
    before = _readings()
    random, changes = torch.get_rng_state(), list[str]()
    # Stand-ins take the streams' place, since pytest itself still writes to them.
    descriptors = [os.dup(number) for number in _STANDARD]
    stand_ins = [os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace") for number in _STANDARD]
    streams, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), stand_ins
    try:
        yield changes
    finally:
        for owner, known in functions:
            same = False
            with contextlib.suppress(Exception):  # values that are no functions may refuse to be compared
                same = vars(owner) == known
            changes += [] if same else _settle_functions(owner, known)
        changed = list[tuple[Setting, Any, str]]()
        for setting, old, now in zip(SETTINGS, before, _readings(), strict=True):
            try:
                change = "" if now is old or old == now else setting.tell(setting.name, old, now)
            except Exception:  # values that a call left may refuse to be compared, or to be printed
                change = setting.name
            if change:
                changed.append((setting, old, change))
        for setting, old, change in changed:
            changes.append(change)
            try:
                setting.restore(old)
            except Exception:
                changes.append(f"{setting.name} could not be restored")
        torch.set_rng_state(random)
        kept = not any(stand_in.closed for stand_in in stand_ins)
        for descriptor, number, stand_in in zip(descriptors, _STANDARD, stand_ins, strict=True):
            try:
                kept = kept and os.path.sameopenfile(descriptor, number)
            except OSError:
                kept = False
            os.dup2(descriptor, number)
            os.close(descriptor)
            with contextlib.suppress(OSError):  # a call closed the file below it
                stand_in.close()
        sys.stdout, sys.stderr = streams
        changes += [] if kept else ["a standard stream"]


def _readings() -> list[Any]:
    found = list[Any]()
    for setting in SETTINGS:
        try:
            found.append(setting.read())
        except Exception:
            found.append(setting.unreadable)
    return found


def _settle_functions(owner: Any, before: dict[str, Any]) -> Iterator[str]:
    def is_function(value: Any) -> bool:  # a function, a class, or what is bound to an instance
        return value is not _FOLLOWS and (callable(value) or hasattr(type(value), "__get__"))

    present, is_class = vars(owner), isinstance(owner, type)
    title = f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__
    for name, function in before.items():
        now = present.get(name)
        if now is function or not is_function(function):
            continue
        wraps = isinstance(now, FunctionType) and vars(now).get("__wrapped__") is function
        if not (wraps and Path(torch.__file__).parent in Path(now.__code__.co_filename).parents):
            setattr(owner, name, function)
            yield f"{title}.{name} was replaced"
    for name in present.keys() - before.keys():
        inherited = is_class and any(name in vars(base) for base in owner.__mro__[1:])
        if inherited and is_function(present[name]):
            delattr(owner, name)
            yield f"{title}.{name} was replaced"


def _modes(name: str, read: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], Any]) -> Setting:
    """Modes each with its number, since only the mode itself is the same, whatever it says that it equals."""

    def restore(old: list[Any]) -> None:
        while read():
            pop()
        for _, mode in old:
            push(mode)

    def tell(name: str, *values: list[Any]) -> str:
        were, are = ([type(mode).__name__ for _, mode in modes] for modes in values)
        return f"{name} from {were} to {are}"

    return Setting(name, lambda: [(id(mode), mode) for mode in read()], restore, tell)


def _autocast(device: str) -> Setting:
    def restore(old: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, old[0])
        torch.set_autocast_dtype(device, old[1])
        torch.clear_autocast_cache()

    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    return Setting(f"autocast on {device}", read, restore)


def _set_inference(enabled: bool) -> None:
    _held.append(torch.inference_mode(enabled))
    _held[-1].__enter__()


def _attribute(name: str, owner: Any, attribute: str) -> Setting:
    def read() -> Any:
        """Of a precision ``none`` chooses nothing, which computes as ``ieee`` does."""
        value = getattr(owner, attribute)
        return value.replace("none", "ieee") if isinstance(value, str) else value

    return Setting(name, read, partial(setattr, owner, attribute))


def _set_limit(number: int, limits: tuple[int, int]) -> None:
    """The soft limit as far as the hard one allows; a hard one that was lowered stays, unless for a superuser."""
    try:
        resource.setrlimit(number, limits)
    except (ValueError, OSError):
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (hard, hard))


def _control(new: str = "") -> str:
    """The control bits in hexadecimal, once they are as they are to be.

    0x1f80 rounds to nearest and keeps denormals. Empty where the layout of C's environment is not known.
    """
    if not hasattr(_LIBC, "fegetenv"):
        return ""
    environment: Any = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _LIBC.fegetenv(environment)
    if new:
        environment[_CONTROL : _CONTROL + 4] = int(new, 16).to_bytes(4, "little")
        _LIBC.fesetenv(environment)
    return hex(int.from_bytes(environment[_CONTROL : _CONTROL + 4], "little") & ~_STICKY)


def _mask() -> str:
    mask = os.umask(0o77)
    os.umask(mask)
    return f"{mask:#o}"


def _tell_filters(name: str, old: tuple[list[Any], int], now: tuple[list[Any], int]) -> str:
    came = [entry for entry in now[0] if entry not in old[0]]
    if len(now[0]) == len(old[0]) + len(came) and now[1] > old[1]:
        return ""
    return "" if old[0] == now[0] else f"{name} from {len(old[0])} to {len(now[0])}, new: {came}"


def _set_filters(old: tuple[list[Any], int]) -> None:
    warnings.filters[:] = old[0]  # type: ignore[index]
    with warnings.catch_warnings():  # which tells the interpreter that they changed
        pass


def _lost_variables(old: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Those not there now. At its first use a library may add variables, and extend others such as a search path."""
    now = vars(os.environ)["_data"]
    return {name: value for name, value in old.items() if value not in now.get(name, b"")}


def _children() -> frozenset[int]:
    """Child processes that this thread started, ended ones included, and those that an ended thread did.

    To ask every thread takes a millisecond once a library has a pool of them. None on a system that does not tell.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return frozenset()
    return frozenset(map(int, read_if_there(Path("/proc/thread-self/children")).split()))


def _tell_left(name: str, before: frozenset[int], now: frozenset[int]) -> str:
    end = time.monotonic() + _PATIENCE
    while (left := _lasting(now - before)) and time.monotonic() < end:
        time.sleep(0.01)
    return f"{name} {len(left)} child process{'es' * (len(left) > 1)} running" if left else ""


def _end_left(before: frozenset[int]) -> None:
    for process in _lasting(_children() - before):
        os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def _lasting(processes: frozenset[int]) -> list[int]:
    found = []
    for process in processes:
        state, command = (read_if_there(Path(f"/proc/{process}/{name}")) for name in ("stat", "cmdline"))
        ended = state.rpartition(")")[2].split()[:1] in ([], ["Z"], ["X"])
        found += [] if ended or any(service in command for service in _SERVICES) else [process]
    return found


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "default device",
        torch.get_default_device,
        lambda old: torch.set_default_device(None if old.type == "cpu" else old),
    ),
    _modes("function modes", overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    _modes("dispatch modes", dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode),
    Setting("inference mode", torch.is_inference_mode_enabled, _set_inference),
    Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting("seed", torch.initial_seed, torch.manual_seed),
    *map(_autocast, ("cpu", "cuda")),
    Setting("cache of autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute("TF32 of cuDNN", torch.backends.cudnn, "allow_tf32"),
    _attribute("float32 precision of everything", torch.backends, "fp32_precision"),
    _attribute("float32 precision of CUDA's matmul", _MATMUL, "fp32_precision"),
    _attribute("float32 precision of oneDNN's matmul", torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    _attribute("reduced fp16 sums", _MATMUL, "allow_fp16_reduced_precision_reduction"),
    _attribute("reduced bf16 sums", _MATMUL, "allow_bf16_reduced_precision_reduction"),
    _attribute("fp16 sums", _MATMUL, "allow_fp16_accumulation"),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("number of threads between operations", torch.get_num_interop_threads),
    *(
        Setting(
            f"handler of {getattr(number, 'name', number)}",
            partial(getsignal, int(number)),  # the function of ``signal`` takes twenty times as long
            partial(lambda number, old: old is None or signal.signal(number, old), number),
        )
        for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    ),
    *(
        Setting(  # how long it still runs changes by itself
            f"timer {name}",
            partial(lambda number: "running" if signal.getitimer(number)[0] else "off", number),
            partial(lambda number, old: old == "off" and signal.setitimer(number, 0), number),
        )
        for name, number in vars(signal).items()
        if name.startswith("ITIMER_")
    ),
    *(
        Setting(f"resource limit {name}", partial(resource.getrlimit, number), partial(_set_limit, number))
        for name, number in vars(resource).items()
        if name.startswith("RLIMIT_")
    ),
    Setting("floating-point control (rounding, denormals)", _control, _control),
    Setting("umask", _mask, lambda old: os.umask(int(old, 8))),
    Setting("working directory", os.getcwd, os.chdir, unreadable="(removed)"),
    Setting(  # a library may add entries
        "sys.path",
        lambda: list(sys.path),
        lambda old: sys.path.__setitem__(slice(None), list(dict.fromkeys([*old, *sys.path]))),
        lambda name, old, now: (
            f"{name} without {', '.join(gone)}" if (gone := [p for p in old if p not in now]) else ""
        ),
    ),
    Setting("warning filters", lambda: (list(warnings.filters), len(sys.modules)), _set_filters, _tell_filters),
    Setting("locale", lambda: locale.setlocale(locale.LC_ALL), lambda old: locale.setlocale(locale.LC_ALL, old)),
    Setting("error handling of numpy", np.geterr, lambda old: np.seterr(**old)),
    Setting(
        "environment variable",
        lambda: dict(vars(os.environ)["_data"]),  # without the decoding of each, which takes as long as all else here
        lambda old: os.environb.update(_lost_variables(old)),
        lambda name, old, now: f"{name} {', '.join(map(os.fsdecode, lost))}" if (lost := _lost_variables(old)) else "",
    ),
    Setting("left", _children, _end_left, _tell_left),
)
"""Restored in this order."""
