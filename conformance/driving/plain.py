"""Whether an object that a call returned is a tensor that can be looked at."""

from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.backends.foreign import type_name


@dataclass(frozen=True)
class Instead:
    """Stands for an object that a call returned in another process, where it has stayed: no tensor to be looked at.

    Attributes:
        kind: name of its type.
        why: what it is.
        is_tensor: whether it is a tensor of some kind.
    """

    kind: str
    why: str
    is_tensor: bool


def kind_of(value: Any) -> str:
    """The name of the type of what a call returned."""
    return value.kind if type(value) is Instead else type_name(value)


def is_tensor(value: Any) -> bool:
    """Whether a call returned a tensor of any kind."""
    return value.is_tensor if type(value) is Instead else issubclass(type(value), torch.Tensor)


def why_not_plain(value: Any) -> str:
    """What an object is instead of a strided, materialised ``torch.Tensor``; empty if it is one, on any device."""
    if type(value) is Instead:
        return value.why
    if type(value) is not torch.Tensor:
        return f"a {type_name(value)}"
    try:
        return _why_not_strided(value) or _why_not_stored(value)
    except RuntimeError:
        return "a tensor whose storage cannot be reached"


def parts_of(value: Any) -> tuple[Any, ...]:
    """The objects that a call returned: those of a tuple or a list, or the only one.

    Plain tensors without anything that was hung on them, such as a gradient or a method of their own.
    """
    kind = next((kind for kind in (tuple, list) if issubclass(type(value), kind)), None)
    parts = (value,) if kind is None else tuple(kind.__iter__(value))
    # The method of the class: the tensor's own may be anything.
    return tuple(torch.Tensor.detach(part) if type(part) is torch.Tensor else part for part in parts)


def _why_not_strided(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    kinds = {
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "lazily conjugated": tensor.is_conj(),
        "lazily negated": tensor.is_neg(),
        "symbolic zero": tensor._is_zerotensor(),
        "functional": torch._is_functional_tensor(tensor),
    }
    return next((f"a {kind} tensor" for kind, holds in kinds.items() if holds), "")


def _why_not_stored(tensor: torch.Tensor) -> str:
    """Of a tensor whose storage is smaller than what its view addresses."""
    if tensor.numel() == 0:
        return ""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    return f"a tensor whose storage holds {held} bytes of {needed}" if held < needed else ""
