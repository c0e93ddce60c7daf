"""What an adapter calls between the operands it is given and the result it returns, step by step; what a result needs.

A function mode sees torch's calls; libraries are handed out as handles, and what they call in turn is not recorded.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from mla_conformance.backends.dependencies import Library

METHOD = "torch.Tensor."
_LOAD = "load"  # the method by which an adapter gets its library
_PLAIN = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Step:
    """A call; a library's objects among its arguments and its results are handles."""

    name: str  # of torch's function as ``torch.cat`` or ``torch.Tensor.view``; of a library's the names that lead to it
    arguments: tuple[Any, ...]  # positional ones
    keywords: dict[str, Any]
    result: Any
    source: Any = None  # the module, as text, or the library's object that the names begin at; None for torch

    @property
    def writes(self) -> bool:
        if self.source is not None:
            return False
        name = self.name.removeprefix(METHOD)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in self.keywords

    @property
    def written(self) -> Any:
        """What may have been written to: of a library all that it was given."""
        if self.source is not None:
            return self.arguments, self.keywords
        return self.keywords.get("out", self.arguments[:1]) if self.writes else ()


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
        with self._recorder.library():
            result = self._recorder.handed(self._value(*bare(arguments), **bare(keywords)))
        self._recorder.steps.append(Step(self._name, arguments, keywords, result, self._source))
        return result

    def __eq__(self, other: object) -> bool:
        return bool(self._value == bare(other))

    def __hash__(self) -> int:
        return hash(self._value)

    def _within(self, value: Any, name: str) -> "Handle":
        return Handle(value, self._recorder, self._source, self._name + name)


class Recorder(TorchFunctionMode):
    """Keeps the steps that are made while it is entered, with all that they mention."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves(result)) or func is torch.Tensor.__setitem__:
            name = resolve_name(func) or str(func)
            name = f"torch.ops.{name}" if name.startswith("aten.") else name
            # Without keywords that only repeat a default.
            known = inspect.signature(func).parameters if isinstance(func, FunctionType) else {}
            told = {n: value for n, value in (kwargs or {}).items() if n not in known or value is not known[n].default}
            step = Step(name, tuple(args), told, result)
            if not step.writes and args and _view_of(result) == _view_of(args[0]) != ():
                return args[0]  # in the place of another view of all of it, which is no step
            self.steps.append(step)
        return result

    def __enter__(self) -> "Recorder":
        self._loads = {cls: vars(cls)[_LOAD] for cls in (Library, *Library.__subclasses__()) if _LOAD in vars(cls)}

        def handing_out(load: Any) -> Any:
            def handed_out(library: Library) -> Any:
                with self.library():
                    return Handle(bare(load(library)), self, library.module)

            return handed_out

        for cls, load in self._loads.items():
            setattr(cls, _LOAD, handing_out(load))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for cls, load in self._loads.items():
            setattr(cls, _LOAD, load)

    @contextmanager
    def library(self) -> Iterator[None]:
        """Without this mode: a library is left alone."""
        super().__exit__(None, None, None)
        try:
            yield
        finally:
            super().__enter__()

    def handed(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self.handed, value))
        plain = isinstance(value, (*_PLAIN, tuple, list, dict, ModuleType))
        return value if plain else Handle(value, self, value)


def bare(value: Any) -> Any:
    """A value with what its handles stand for."""
    if isinstance(value, Handle):
        return value._value
    if isinstance(value, dict):
        return {bare(key): bare(part) for key, part in value.items()}
    return type(value)(map(bare, value)) if type(value) in (tuple, list) else value


def leaves(value: Any) -> Iterator[torch.Tensor | Handle]:
    if isinstance(value, torch.Tensor | Handle):
        yield value
        return
    value = vars(value) if is_dataclass(value) else value
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    for part in parts if isinstance(parts, tuple | list) else ():
        yield from leaves(part)


def owner_of(leaf: torch.Tensor | Handle) -> int:
    """The id of a tensor, or of the object that a handle's names begin at."""
    return id(leaf._source) if isinstance(leaf, Handle) else id(leaf)


def needed(steps: Sequence[Step], results: Sequence[torch.Tensor]) -> list[Step]:
    """The steps that made something that results need, or may have written to it, or changed what it is made of."""
    objects, storages = set(map(owner_of, results)), _storages(list(results))
    kept = []
    for step in reversed(steps):
        mentioned = [step.arguments, step.keywords]
        touched = {id(step.source), *map(owner_of, leaves(mentioned))}
        made = {*map(owner_of, leaves(step.result)), *(touched if step.source is not None else ())}
        if made & objects or _storages(step.written) & storages:
            kept.append(step)
            objects |= touched
            storages |= _storages(mentioned)
    return kept[::-1]


def _storages(value: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in leaves(value) if isinstance(x, torch.Tensor)} - {0}


def _view_of(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, torch.Tensor):
        return ()
    return x.untyped_storage().data_ptr(), x.dtype, x.device, x.shape, x.stride(), x.storage_offset()
