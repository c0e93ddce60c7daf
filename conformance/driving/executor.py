"""Who carries out what is a backend's: this process, whose state a call must leave as it is, or another for it."""

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_conformance.backends.foreign import LINE, cut, one_line, type_name, user_interrupts
from mla_conformance.driving.settings import builtins_now, settle_builtins, watched
from mla_conformance.problems.memory import device_lost, out_of_memory

_looks: list[Callable[[], Iterable[str]]] = []


@dataclass(frozen=True)
class StepResult:
    """What became of a step.

    Attributes:
        value: what it returned; None if it raised.
        kept: the same where the step was carried out, for later steps.
        error: one line for an exception, and the traceback behind it.
        out_of_memory: the exception says that memory ran out.
        disturbed: settings of the process that it changed; they are restored as far as they can be.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    out_of_memory: bool = False
    disturbed: tuple[str, ...] = ()
    kept: Any = None


def look_afterwards(look: Callable[[], Iterable[str]]) -> None:
    """Have the step that is being run tell what else it changed, once the process is as it was before."""
    _looks.append(look)


def run_step(step: Callable[[], Any]) -> StepResult:
    """Run a step that is a backend's.

    Raises:
        KeyboardInterrupt: the user asked for the end meanwhile; one that the step itself raises is its failure.
    """
    process, replaced, looks = os.getpid(), list[str](), len(_looks)
    with user_interrupts() as interrupts, watched() as changes:
        before = builtins_now()
        try:
            try:
                value = step()
            finally:
                replaced = settle_builtins(before)
            outcome = StepResult(value)
        except BaseException as error:
            if interrupts:
                raise
            outcome = StepResult(None, one_line(error), _traceback(), _ran_out(error))
        if os.getpid() != process:
            os._exit(0)  # the step forked, and its child came back into a run that is not its own
    seen = [change for look in _looks[looks:] for change in look()]
    del _looks[looks:]
    return replace(outcome, disturbed=(*replaced, *changes, *seen))


def _traceback() -> str:
    """The traceback of the present exception, which may refuse to be printed."""
    try:
        return cut(traceback.format_exc(), LINE)
    except BaseException as error:
        return f"(no traceback can be made: {type_name(error)})"


def _ran_out(error: BaseException) -> bool:
    """Whether an exception, or one of a group, says that memory ran out; its text may refuse to be made."""
    try:
        if isinstance(error, BaseExceptionGroup):
            return any(map(_ran_out, error.exceptions))
        return out_of_memory(error)
    except BaseException:
        return False


class Executor:
    """Carries out steps in this process.

    A step is a partial of functions that a module names, over calls, problems, plain values and what earlier steps
    made: nothing in it says in which process it takes place.
    """

    def call(self, step: Callable[[], Any], reached: Iterable[torch.Tensor] = ()) -> StepResult:
        """A step that returns what a call returned."""
        done = run_step(step)
        return replace(done, kept=done.value)

    def make(self, step: Callable[[], Any]) -> StepResult:
        """A step whose value is for later steps only."""
        return run_step(step)

    def query(self, question: Callable[[], Any], kind: Any) -> StepResult:
        """A step that answers with plain data of this type."""
        return run_step(question)

    def lost(self, device: torch.device) -> bool:
        """Whether the steps destroyed the GPU's context that they run in."""
        return device_lost(device)

    @property
    def spent(self) -> bool:
        return False

    def begin(self) -> None:
        """What earlier trials handed over is needed no more."""

    def make_room(self) -> None:
        """Give back memory of the device that is held without need."""


IN_PROCESS = Executor()


def itself(value: Any) -> Any:
    return value
