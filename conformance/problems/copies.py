"""Copies of what holds tensors: what is plain is pickled, in a tenth of the time that ``deepcopy`` takes over it."""

import io
import pickle
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

Value = TypeVar("Value")


def over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same form as another one, over another storage."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


class Original(Generic[Value]):
    """A value of which copies are made, as it is now; its tensors must stay as they are.

    What is ``shared`` is the same object in all of them.
    """

    def __init__(self, value: Value, shared: Iterable[Any] = ()) -> None:
        self.value, self._shared, self.tensors = value, tuple(shared), list[torch.Tensor]()
        packer = _Packer(file := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        packer.numbers, packer.tensors = {id(x): -1 - n for n, x in enumerate(self._shared)}, self.tensors
        packer.dump(value)
        self._form = file.getvalue()

    def copy(self) -> Value:
        storages, made = dict[int, torch.UntypedStorage](), list[torch.Tensor]()
        for tensor in self.tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()
            made.append(over(storages[storage._cdata], tensor))
        reader = _Reader(io.BytesIO(self._form))
        reader.objects = [*made, *reversed(self._shared)]  # those are counted from the end
        value: Value = reader.load()
        return value


class _Packer(pickle.Pickler):
    numbers: dict[int, int]
    tensors: list[torch.Tensor]

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is torch.Tensor and id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self.numbers.get(id(value))


class _Reader(pickle.Unpickler):
    objects: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.objects[number]
