"""Functions of Python, of torch and of numpy, of which a call must replace none.

A library may add names and import modules; a name that hides an inherited one replaces it. Torch's compiler, once it is
imported, wraps functions of torch.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

_OWNERS: tuple[Any, ...] = (torch, torch.Tensor, torch.nn.functional, np)
_BUILTINS = vars(builtins)
_FOLLOWS = torch.Storage  # type: ignore[attr-defined]
"""A class that torch replaces by itself when the default dtype changes."""


@dataclass(frozen=True)
class Functions:
    """The functions of a module or a class at one moment.

    Attributes:
        owner: the module or class.
        present: everything in it, as it is whenever one looks.
        names: everything that was in it, functions or not.
        functions: its functions by name.
        read: of what is present, the values of these names.
        values: what it read.
    """

    owner: Any
    present: Mapping[str, Any]
    names: frozenset[str]
    functions: dict[str, Any]
    read: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    values: tuple[Any, ...]

    @staticmethod
    def of(owner: Any) -> "Functions":
        """The functions as they are now."""
        present = vars(owner)
        found = {name: value for name, value in present.items() if _is_function(value)}
        read = itemgetter(*found)
        return Functions(owner, present, frozenset(present), found, read, read(present))

    def unchanged(self) -> bool:
        """Whether no name came or went and no function is another."""
        try:
            return len(self.present) == len(self.names) and self.read(self.present) == self.values
        except KeyError:
            return False

    def settle(self) -> Iterator[str]:
        """Put back what was replaced, and tell its names."""
        for name, function in self.functions.items():
            now = self.present.get(name)
            if now is not function and not _is_wrapped_by_torch(now, function):
                setattr(self.owner, name, function)
                yield f"{self._title}.{name} was replaced"
        for name in self.present.keys() - self.names:
            if self._hides(name):
                delattr(self.owner, name)
                yield f"{self._title}.{name} was replaced"

    def _hides(self, name: str) -> bool:
        """Whether a function that was added stands before an inherited one."""
        bases = self.owner.__mro__[1:] if isinstance(self.owner, type) else ()
        return _is_function(self.present[name]) and any(name in vars(base) for base in bases)

    @property
    def _title(self) -> str:
        if isinstance(self.owner, type):
            return f"{self.owner.__module__}.{self.owner.__qualname__}"
        return str(self.owner.__name__)


class WatchedFunctions:
    """All functions that are watched."""

    def __init__(self) -> None:
        self._known = [Functions.of(owner) for owner in _OWNERS]

    def now(self) -> list[Functions]:
        """The functions as they are now; only what differs from the last time is taken down anew."""
        self._known = [known if known.unchanged() else Functions.of(known.owner) for known in self._known]
        return self._known


def settle_builtins(before: dict[str, Any]) -> list[str]:
    """Put back Python's own functions, and tell which were replaced; with none of them, since any may be another.

    Args:
        before: what :func:`builtins_now` gave.
    """
    present = _BUILTINS
    changed = [name for name in before if name[0] != "_" and (name not in present or present[name] is not before[name])]
    for name in changed:
        present[name] = before[name]
    return [f"builtins.{name} was replaced" for name in changed]


def builtins_now() -> dict[str, Any]:
    """Python's own functions as they are now."""
    return _BUILTINS.copy()


def _is_wrapped_by_torch(now: Any, function: Any) -> bool:
    if not isinstance(now, FunctionType) or vars(now).get("__wrapped__") is not function:
        return False
    return Path(torch.__file__).parent in Path(now.__code__.co_filename).parents


def _is_function(value: Any) -> bool:
    """Functions, classes, and what is bound to an instance."""
    return value is not _FOLLOWS and (callable(value) or hasattr(type(value), "__get__"))
