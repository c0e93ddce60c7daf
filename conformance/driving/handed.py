"""What a call was handed, beside its bytes: the forms of its tensors and the fields of its metadata must stay.

A library may hang further attributes on metadata; what stands in it is the caller's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

_KEPT = (bool, int, float, str, tuple, torch.dtype, type(None))


@dataclass(frozen=True)
class Handed:
    """The operands of a call at one moment: each tensor with its name, form and storage, and fields by their names."""

    tensors: list[tuple[str, torch.Tensor, dict[str, Any], torch.UntypedStorage]]
    metadata: Any
    fields: dict[str, Any]

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
                _restore(tensor, form, storage)
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


def _restore(tensor: torch.Tensor, form: dict[str, Any], storage: torch.UntypedStorage) -> None:
    """Its form over the storage that it had; what that has lost by being made smaller stays lost."""
    if storage.nbytes() != form["bytes"]:
        storage.resize_(form["bytes"])
    if tensor.is_leaf:
        tensor.requires_grad_(form["requires_grad"])
    whole = torch.empty(0, dtype=form["dtype"], device=storage.device)
    tensor.data = whole.set_(storage, form["offset"], form["shape"], form["strides"])


def _fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """By name: a plain value itself, the items of a list, and of any other object which one it is."""
    yield name, value if isinstance(value, _KEPT) else tuple(value) if type(value) is list else id(value)
    if is_dataclass(value):
        for field in fields(value):
            yield from _fields(f"{name}.{field.name}", getattr(value, field.name, None))
