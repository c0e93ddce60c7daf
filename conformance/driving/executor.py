"""Who carries out what is a backend's: this process, whose state a call must leave as it is, or another for it.

Nor may a call change what it was handed, beside its bytes.
"""

import builtins
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from mla_conformance.backends.foreign import LINE, cut, one_line, type_name, user_interrupts
from mla_conformance.driving.settings import settle_builtins, watched
from mla_conformance.problems.memory import device_lost, out_of_memory

_looks: list[Callable[[], Iterable[str]]] = []


@dataclass(frozen=True)
class StepResult:
    value: Any = None  # what it returned; None if it raised
    error: str = ""  # one line for an exception, and the traceback behind it
    traceback: str = ""
    out_of_memory: bool = False  # the exception says that memory ran out
    disturbed: tuple[str, ...] = ()  # settings of the process that it changed; they are restored as far as they can be
    kept: Any = None  # the same where the step was carried out, for later steps


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
        before = vars(builtins).copy()
        try:
            try:
                value = step()
            finally:
                replaced = settle_builtins(before)
            outcome = StepResult(value)
        except BaseException as error:
            if interrupts:
                raise
            try:
                said = cut(traceback.format_exc(), LINE)
            except BaseException as refusal:
                said = f"(no traceback can be made: {type_name(refusal)})"
            outcome = StepResult(None, one_line(error), said, _ran_out(error))
        if os.getpid() != process:
            os._exit(0)  # the step forked, and its child came back into a run that is not its own
    seen = [change for look in _looks[looks:] for change in look()]
    del _looks[looks:]
    return replace(outcome, disturbed=(*replaced, *changes, *seen))


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


_KEPT = (bool, int, float, str, tuple, torch.dtype, type(None))


@dataclass(frozen=True)
class Handed:
    """The operands of a call at one moment, whose forms and fields must stay, beside their bytes.

    A library may hang further attributes on metadata; what stands in it is the caller's.
    """

    # each with its name, form and storage
    tensors: list[tuple[str, torch.Tensor, dict[str, Any], torch.UntypedStorage]]
    metadata: Any
    fields: dict[str, Any]  # of the metadata, by their names

    @staticmethod
    def of(call: Any, out: torch.Tensor | None) -> "Handed":
        """As they are now, the output tensor among them, if there is one."""
        metadata, named = getattr(call, "metadata", None), call.owned() | ({} if out is None else {"out": out})
        owned = [(name, tensor, _form(tensor), tensor.untyped_storage()) for name, tensor in named.items()]
        return Handed(owned, metadata, dict(_fields("metadata", metadata)))

    def settle(self) -> Iterator[str]:
        """What is otherwise now, in words; tensors get their forms back, since they are looked at afterwards."""
        for name, tensor, form, storage in self.tensors:
            now = _form(tensor)
            if changed := [part for part, old in form.items() if now[part] != old]:
                # What a storage has lost by being made smaller stays lost.
                if storage.nbytes() != form["bytes"]:
                    storage.resize_(form["bytes"])
                if tensor.is_leaf:
                    tensor.requires_grad_(form["requires_grad"])
                whole = torch.empty(0, dtype=form["dtype"], device=storage.device)
                tensor.data = whole.set_(storage, form["offset"], form["shape"], form["strides"])
                yield from (f"{part} of {name} was {form[part]}, is {now[part]}" for part in changed)
        now = dict(_fields("metadata", self.metadata))
        yield from (f"{name} was replaced" for name, old in self.fields.items() if now.get(name) != old)


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    storage = torch.Tensor.untyped_storage(tensor)
    return {
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "address": storage.data_ptr(),
        "bytes": storage.nbytes(),
    }


def _fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """By name: a plain value itself, the items of a list, and of any other object which one it is."""
    yield name, value if isinstance(value, _KEPT) else tuple(value) if type(value) is list else id(value)
    if is_dataclass(value):
        for field in fields(value):
            yield from _fields(f"{name}.{field.name}", getattr(value, field.name, None))
