"""Which steps of a recording a result needs: those that made something of it, or may have written to it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mla_conformance.export.recording import Handle, Step, handles_in, tensors_in

METHOD = "torch.Tensor."


def needed(steps: Sequence[Step], results: Sequence[torch.Tensor]) -> list[Step]:
    """The steps that the results come from: those that made something needed, or may have written to it."""
    wanted = _Needed()
    wanted.add(list(results))
    kept = [step for step in reversed(steps) if wanted.takes(step)]
    return kept[::-1]


class _Needed:
    def __init__(self) -> None:
        self._objects: set[int] = set()
        self._storages: set[int] = set()

    def add(self, value: Any) -> None:
        """Tensors and objects that something kept is made from."""
        self._objects |= _ids(value)
        self._storages |= set(_storages(value))

    def takes(self, step: Step) -> bool:
        """Whether a step is needed; then so is what it mentions."""
        mentioned = [step.arguments, step.keywords]
        touched = {id(step.source)} | {owner_of(each) for each in handles_in(mentioned)}
        takes = bool(_ids(step.result) & self._objects)
        if step.source is not None:  # a library may change its object, and write to what it is given
            takes |= bool(touched & self._objects) or bool(set(_storages(mentioned)) & self._storages)
        elif writes(step):
            takes |= bool(set(_storages(_target(step))) & self._storages)
        if takes:
            self.add(mentioned)
            self._objects |= {id(step.source)}
        return takes


def _ids(value: Any) -> set[int]:
    """Of the tensors and of a library's objects in a value."""
    return {*map(id, tensors_in(value)), *map(owner_of, handles_in(value))}


def owner_of(handle: Handle) -> int:
    """The id of the object that a handle's names begin at."""
    return id(handle.place[0])


def _storages(value: Any) -> Iterator[int]:
    return (pointer for tensor in tensors_in(value) if (pointer := tensor.untyped_storage().data_ptr()))


def writes(step: Step) -> bool:
    """Whether a function of torch writes to an operand."""
    if step.source is not None:
        return False
    name = step.name.removeprefix(METHOD)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in step.keywords


def _target(step: Step) -> Any:
    return step.keywords.get("out", step.arguments[:1])


def is_alias(step: Step) -> bool:
    """Whether what came back is the first argument as it was, such as a copy that was not necessary."""
    made, given = step.result, step.arguments[0] if step.arguments else None
    if step.source is not None or writes(step) or not isinstance(made, torch.Tensor):
        return False
    return isinstance(given, torch.Tensor) and _view_of(made) == _view_of(given)


def _view_of(x: torch.Tensor) -> tuple[Any, ...]:
    return x.untyped_storage().data_ptr(), x.dtype, x.device, x.shape, x.stride(), x.storage_offset()


def aliases(steps: Sequence[Step]) -> dict[int, int]:
    """The ids of tensors that are others, with those of the others."""
    found: dict[int, int] = {}
    for step in filter(is_alias, steps):
        found[id(step.result)] = found.get(id(step.arguments[0]), id(step.arguments[0]))
    return {mine: others for mine, others in found.items() if mine != others}
