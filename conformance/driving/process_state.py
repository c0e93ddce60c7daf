"""The state of the process, which a call must leave as it is: what one case changes, the next would inherit."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.driving.functions import Functions, WatchedFunctions
from mla_conformance.driving.system_settings import SYSTEM_SETTINGS
from mla_conformance.driving.torch_settings import TORCH_SETTINGS, StandardStreams

_SETTINGS = (*TORCH_SETTINGS, *SYSTEM_SETTINGS)
_functions = WatchedFunctions()


@dataclass(frozen=True)
class ProcessState:
    """The state at one moment.

    Attributes:
        functions: of torch and of what judges.
        settings: the values of all settings, in their order.
        random: state of torch's CPU generator; drawing from it is no change, a new seed is.
        streams: the standard streams.
    """

    functions: list[Functions]
    settings: list[Any]
    random: torch.Tensor
    streams: StandardStreams

    @staticmethod
    @contextlib.contextmanager
    def watched() -> Iterator[list[str]]:
        """Restore the state at the end of the block, and fill the list with what had changed."""
        settings = [setting.value() for setting in _SETTINGS]
        before = ProcessState(_functions.now(), settings, torch.get_rng_state(), StandardStreams.replaced())
        changes: list[str] = []
        try:
            yield changes
        finally:
            changes += before._settle()

    def _settle(self) -> Iterator[str]:
        """Restore everything, functions first, since those of torch restore the rest."""
        for functions in self.functions:
            if not functions.unchanged():
                yield from functions.settle()
        pairs = zip(_SETTINGS, self.settings, strict=True)
        changed = [(setting, old, change) for setting, old in pairs if (change := setting.change(old))]
        for setting, old, change in changed:
            yield from filter(None, (change, setting.undo(old)))
        torch.set_rng_state(self.random)
        yield from filter(None, [self.streams.settle()])
