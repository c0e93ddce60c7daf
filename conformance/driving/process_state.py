"""Settings of the process that a call must leave as they are: what one case changes, the next would inherit."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch

_STANDARD = (1, 2)


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text, as it is printed
    except FileNotFoundError:
        return "(removed)"


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_default_device),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "seed": (torch.initial_seed, torch.manual_seed),
    "working directory": (_directory, os.chdir),
}


@dataclass(frozen=True)
class ProcessState:
    """The settings at one moment.

    Attributes:
        settings: values by name.
        random: state of torch's CPU generator; drawing from it is no change, a new seed is.
        environment: the variables; at its first use a library may add some, and extend others such as a search path.
        streams: ``sys.stdout`` and ``sys.stderr``.
        stand_ins: what a call finds in their place, since pytest itself still writes to the streams.
        descriptors: duplicates of the descriptors 1 and 2.
    """

    settings: dict[str, Any]
    random: torch.Tensor
    environment: dict[str, str]
    streams: tuple[TextIO, TextIO]
    stand_ins: tuple[TextIO, ...]
    descriptors: tuple[int, ...]

    @staticmethod
    @contextlib.contextmanager
    def watched() -> Iterator[list[str]]:
        """Restore the settings at the end of the block, and fill the list with what had changed."""
        before = ProcessState._now()
        changes: list[str] = []
        try:
            yield changes
        finally:
            lost = before._lost_variables()
            changes += before._changes(lost)
            before._restore(lost)

    @staticmethod
    def _now() -> "ProcessState":
        settings = {name: read() for name, (read, _) in _SETTINGS.items()}
        descriptors = tuple(os.dup(number) for number in _STANDARD)
        streams = (sys.stdout, sys.stderr)
        stand_ins = tuple(os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace") for number in _STANDARD)
        sys.stdout, sys.stderr = stand_ins
        return ProcessState(settings, torch.get_rng_state(), dict(os.environ), streams, stand_ins, descriptors)

    def _changes(self, lost: dict[str, str]) -> list[str]:
        pairs = [(name, old, _SETTINGS[name][0]()) for name, old in self.settings.items()]
        found = [f"{name} from {old} to {now}" for name, old, now in pairs if old != now]
        found += [f"environment variable {name}" for name in lost]
        if any(stream.closed for stream in self.stand_ins) or not all(map(_same_file, self.descriptors, _STANDARD)):
            found.append("a standard stream")
        return found

    def _lost_variables(self) -> dict[str, str]:
        return {name: value for name, value in self.environment.items() if value not in os.environ.get(name, "")}

    def _restore(self, lost: dict[str, str]) -> None:
        for kept, number, stand_in in zip(self.descriptors, _STANDARD, self.stand_ins, strict=True):
            os.dup2(kept, number)
            os.close(kept)
            with contextlib.suppress(OSError):  # a call closed the file below it
                stand_in.close()
        sys.stdout, sys.stderr = self.streams
        os.environ.update(lost)
        for name, old in self.settings.items():
            read, restore = _SETTINGS[name]
            if read() != old:
                restore(old)
        torch.set_rng_state(self.random)


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False
