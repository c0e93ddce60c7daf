"""Running code of a backend: whatever it raises is caught, and whatever it changes in the process is put back."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from mla_conformance.driving.plain import type_name
from mla_conformance.driving.process_state import ProcessState
from mla_conformance.problems.memory import out_of_memory


@dataclass(frozen=True)
class Attempt:
    """What became of a step.

    Attributes:
        value: what it returned; None if it raised.
        error: one line for an exception, and the traceback behind it.
        out_of_memory: the exception says that memory ran out.
        disturbed: settings of the process that it changed; they are restored as far as they can be.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    out_of_memory: bool = False
    disturbed: tuple[str, ...] = ()


def attempt(step: Callable[[], Any]) -> Attempt:
    """Run a step that is a backend's.

    Raises:
        KeyboardInterrupt: the user asked for the end meanwhile; one that the step itself raises is its failure.
    """
    process = os.getpid()
    with _interrupts() as interrupts, ProcessState.watched() as changes:
        try:
            outcome = Attempt(step())
        except BaseException as error:
            if interrupts:
                raise
            outcome = Attempt(None, one_line(error), _traceback(), _ran_out(error))
        if os.getpid() != process:
            os._exit(0)  # the step forked, and its child came back into a run that is not its own
    return replace(outcome, disturbed=tuple(changes))


def one_line(error: BaseException) -> str:
    """An exception's type and text on one line that every encoding can carry."""
    try:
        said = "".join([str(error), ""])  # of a plain text, should a subclass of one have been returned
    except BaseException:
        said = "(its text cannot be made)"
    text = " ".join(f"{type_name(error)}: {said}".split())
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _traceback() -> str:
    """The traceback of the present exception, which may refuse to be printed."""
    try:
        return traceback.format_exc()
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


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The interrupts that come from outside during the block; they are raised as ever."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    noted = threading.current_thread() is threading.main_thread()
    noted = noted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if noted:
        signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        if noted:
            signal.signal(signal.SIGINT, signal.default_int_handler)
