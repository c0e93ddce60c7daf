"""What an adapter calls between the operands it is given and the result it returns, step by step.

Calls of torch are seen by a function mode. Libraries are handed out as handles, through which an adapter calls them;
what a library calls in turn is its own affair and not recorded.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from mla_conformance.backends.dependencies import Library

_LOAD = "load"
"""The method by which an adapter gets its library."""
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        name: of torch's function as ``torch.cat`` or ``torch.Tensor.view``; of a library's the names that lead to it.
        arguments: positional ones; a library's objects among them are handles.
        keywords: the others.
        result: what came back; a library's objects are handles.
        source: the module, as text, or the library's object that the names begin at; None for torch.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any
    source: Any = None


class Handle:
    """A module, class, function or object of a library, as an adapter sees it while it is recorded."""

    def __init__(self, value: Any, recorder: "Recorder", source: Any, name: str = "") -> None:
        self._value, self._recorder, self._source, self._name = value, recorder, source, name

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        return found if isinstance(found, _PLAIN) else self._within(found, f".{name}")

    def __getitem__(self, key: Any) -> Any:
        return self._within(self._value[key], f"[{key!r}]")  # the grid of a Triton kernel

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it, and keep that."""
        return self._recorder.call(self, arguments, keywords)

    def __eq__(self, other: object) -> bool:
        return bool(self._value == bare(other))

    def __hash__(self) -> int:
        return hash(self._value)

    def _within(self, value: Any, name: str) -> "Handle":
        return Handle(value, self._recorder, self._source, self._name + name)

    @property
    def place(self) -> tuple[Any, str]:
        """Where its names begin, and the names."""
        return self._source, self._name


class Recorder(TorchFunctionMode):
    """Keeps the steps that are made while it is entered, with all that they mention."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if list(tensors_in(result)) or func is torch.Tensor.__setitem__:
            self.steps.append(Step(_name_of(func), tuple(args), _said(func, kwargs or {}), result))
        return result

    def __enter__(self) -> "Recorder":
        self._loads = {cls: vars(cls)[_LOAD] for cls in (Library, *Library.__subclasses__()) if _LOAD in vars(cls)}
        for cls, load in self._loads.items():
            setattr(cls, _LOAD, self._handing_out(load))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for cls, load in self._loads.items():
            setattr(cls, _LOAD, load)

    def _handing_out(self, load: Any) -> Any:
        def handing_out(library: Library) -> Any:
            with self._library():
                return Handle(bare(load(library)), self, library.module)

        return handing_out

    def call(self, handle: Handle, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call what a handle stands for, and keep that."""
        source, name = handle.place
        with self._library():
            result = self._handed(bare(handle)(*bare(arguments), **bare(keywords)))
        self.steps.append(Step(name, arguments, keywords, result, source))
        return result

    @contextmanager
    def _library(self) -> Iterator[None]:
        """Without this mode: a library is left alone."""
        super().__exit__(None, None, None)
        try:
            yield
        finally:
            super().__enter__()

    def _handed(self, value: Any) -> Any:
        """A result as the adapter gets it."""
        if type(value) in (tuple, list):
            return type(value)(map(self._handed, value))
        plain = isinstance(value, (*_PLAIN, tuple, list, dict, ModuleType))
        return value if plain else Handle(value, self, value)


def bare(value: Any) -> Any:
    """A value with what its handles stand for."""
    if isinstance(value, Handle):
        return value._value
    if isinstance(value, dict):
        return {bare(key): bare(part) for key, part in value.items()}
    return type(value)(map(bare, value)) if type(value) in (tuple, list) else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (found for part in value.values() for found in tensors_in(part))
    elif isinstance(value, tuple | list):
        yield from (found for part in value for found in tensors_in(part))
    elif is_dataclass(value):
        yield from tensors_in(vars(value))


def handles_in(value: Any) -> Iterator[Handle]:
    """The handles of an argument or a result."""
    if isinstance(value, Handle):
        yield value
    elif isinstance(value, dict):
        yield from (found for pair in value.items() for found in handles_in(list(pair)))
    elif isinstance(value, tuple | list):
        yield from (found for part in value for found in handles_in(part))


def _said(func: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords without those that only repeat a default."""
    known = inspect.signature(func).parameters if isinstance(func, FunctionType) else {}
    return {name: value for name, value in keywords.items() if name not in known or value is not known[name].default}


def _name_of(func: Any) -> str:
    name = resolve_name(func) or str(func)
    return f"torch.ops.{name}" if name.startswith("aten.") else name
