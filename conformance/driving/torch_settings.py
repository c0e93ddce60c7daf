"""Settings that a call must leave as they are: what a setting is, and those of torch; one more is one line."""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

UNREADABLE = "(unreadable)"
"""Stands for a value whose reading raised."""


def from_to(name: str, old: Any, now: Any) -> str:
    """What a plain value became; empty if it is the same."""
    return "" if old == now else f"{name} from {old} to {now}"


def each_from_to(name: str, old: dict[str, Any], now: dict[str, Any]) -> str:
    """What the values of a mapping became, each with its key; empty if all that were there are the same."""
    return "; ".join(from_to(f"{name} {key}", value, now.get(key)) for key, value in old.items() if now[key] != value)


def _nothing(_old: Any) -> None:
    """Restore nothing: there is no way."""


@dataclass(frozen=True)
class Setting:
    """A setting that a call must leave as it is.

    Attributes:
        name: how reports call it.
        read: its value now.
        restore: puts back a value that was read; without it a change is told only.
        tell: of name, old value and new one, what counts as a change, as a text; empty for none.
    """

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object] = _nothing
    tell: Callable[[str, Any, Any], str] = from_to

    @staticmethod
    def attribute(name: str, owner: Any, attribute: str) -> "Setting":
        """A setting that is an attribute of ``owner``."""
        return Setting(name, partial(getattr, owner, attribute), partial(setattr, owner, attribute))

    def value(self) -> Any:
        """What is read now; a call may have left a state that cannot be read."""
        try:
            return self.read()
        except Exception:
            return UNREADABLE

    def change(self, old: Any) -> str:
        """What became of a value that was read; values that a call left may refuse to be compared or printed."""
        now = self.value()
        if now is old:
            return ""
        try:
            return self.tell(self.name, old, now)
        except Exception:
            return self.name

    def undo(self, old: Any) -> str:
        """Put back a value that was read; tell if that fails."""
        try:
            self.restore(old)
        except Exception:
            return f"{self.name} could not be restored"
        return ""


_STANDARD = (1, 2)


@dataclass(frozen=True)
class StandardStreams:
    """The streams at one moment.

    Attributes:
        streams: ``sys.stdout`` and ``sys.stderr``.
        stand_ins: what a call finds in their place, since pytest itself still writes to the streams.
        descriptors: duplicates of the descriptors 1 and 2.
    """

    streams: tuple[TextIO, TextIO]
    stand_ins: tuple[TextIO, ...]
    descriptors: tuple[int, ...]

    @staticmethod
    def replaced() -> "StandardStreams":
        """Put stand-ins into their place."""
        descriptors = tuple(os.dup(number) for number in _STANDARD)
        streams = (sys.stdout, sys.stderr)
        stand_ins = tuple(os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace") for number in _STANDARD)
        sys.stdout, sys.stderr = stand_ins
        return StandardStreams(streams, stand_ins, descriptors)

    def settle(self) -> str:
        """Put the streams back, and tell whether one was closed or redirected."""
        kept = all(map(_same_file, self.descriptors, _STANDARD)) and not any(x.closed for x in self.stand_ins)
        for descriptor, number, stand_in in zip(self.descriptors, _STANDARD, self.stand_ins, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
            with contextlib.suppress(OSError):  # a call closed the file below it
                stand_in.close()
        sys.stdout, sys.stderr = self.streams
        return "" if kept else "a standard stream"


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


_held: list[Any] = []
"""Modes that were entered to undo another: a mode ends with its object."""


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _describe_modes(name: str, old: list[Any], now: list[Any]) -> str:
    """Modes that came or went."""
    if [*map(id, old)] == [*map(id, now)]:
        return ""
    return f"{name} from {[type(mode).__name__ for mode in old]} to {[type(mode).__name__ for mode in now]}"


def _modes(name: str, read: Callable[[], list[Any]], pop: Callable[[], Any], push: Callable[[Any], Any]) -> Setting:
    """A stack of modes."""

    def restore(old: list[Any]) -> None:
        while read():
            pop()
        for mode in old:
            push(mode)

    return Setting(name, read, restore, _describe_modes)


def _set_inference(enabled: bool) -> None:
    mode = torch.inference_mode(enabled)
    mode.__enter__()
    _held.append(mode)


def _autocast(device: str) -> Setting:
    """Whether operations on a device choose their own dtypes, and which."""

    def restore(old: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, old[0])
        torch.set_autocast_dtype(device, old[1])
        torch.clear_autocast_cache()

    read = partial(_autocast_of, device)
    return Setting(f"autocast on {device}", read, restore)


def _autocast_of(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _precision(name: str, backend: Any) -> Setting:
    """The float32 precision of a group of operations; ``none`` chooses nothing, which computes as ``ieee`` does."""

    def read() -> str:
        return str(backend.fp32_precision).replace("none", "ieee")

    return Setting(f"float32 precision of {name}", read, partial(setattr, backend, "fp32_precision"))


TORCH_SETTINGS: tuple[Setting, ...] = (
    Setting("default device", torch.get_default_device, _set_default_device),
    _modes("function modes", overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode),
    _modes("dispatch modes", dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode),
    Setting("inference mode", torch.is_inference_mode_enabled, _set_inference),
    Setting("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    Setting("seed", torch.initial_seed, torch.manual_seed),
    _autocast("cpu"),
    _autocast("cuda"),
    Setting("cache of autocast", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Setting.attribute("TF32 of cuDNN", torch.backends.cudnn, "allow_tf32"),
    _precision("everything", torch.backends),
    _precision("CUDA's matmul", torch.backends.cuda.matmul),
    _precision("oneDNN's matmul", torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
    Setting.attribute("reduced fp16 sums", torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    Setting.attribute("reduced bf16 sums", torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    Setting.attribute("fp16 sums", torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    Setting("number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("number of threads between operations", torch.get_num_interop_threads),
)
"""Restored in this order: a mode that was left entered must not see how the others are."""
