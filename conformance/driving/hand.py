"""Who carries out what is a backend's: this process, unless another one stands for it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from mla_conformance.driving.attempt import Attempt, attempt
from mla_conformance.problems.memory import device_lost


class Hand:
    """Carries out steps in this process.

    A step is a partial of functions that a module names, over calls, problems, plain values and what earlier steps
    made: nothing in it says in which process it takes place.
    """

    def attempt(self, step: Callable[[], Any], reached: Iterable[torch.Tensor] = ()) -> Attempt:
        """A step that returns what a call returned.

        Args:
            step: the step.
            reached: memory of the caller that it may write, and that is looked at afterwards.
        """
        done = attempt(step)
        return replace(done, kept=done.value)

    def make(self, step: Callable[[], Any]) -> Attempt:
        """A step whose value is for later steps only."""
        return attempt(step)

    def ask(self, question: Callable[[], Any], kind: Any) -> Attempt:
        """A step that answers with plain data of this type."""
        return attempt(question)

    def lost(self, device: torch.device) -> bool:
        """Whether the steps destroyed the GPU's context that they run in."""
        return device_lost(device)

    def begin(self) -> None:
        """What earlier trials handed over is needed no more."""

    def make_room(self) -> None:
        """Give back memory of the device that is held without need."""


HERE = Hand()


def itself(value: Any) -> Any:
    """What an earlier step kept, as it is now."""
    return value
