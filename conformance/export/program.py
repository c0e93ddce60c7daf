"""What a call does between its operands and its result, recorded, and as statements that a person might have written.

A function mode sees torch's calls; libraries are handed out as handles, and what they call in turn is not recorded.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from mla_conformance.backends.dependencies import Library
from mla_conformance.export.inputs import NotWritable, folded, literal

LIBRARY = "library"  # a script's own name for the module that it calls, with a number behind it for every further one
_INLINED = 72  # characters of an expression that stands within another one at most
_OPERATORS = {
    "__eq__": "==", "eq": "==", "__ne__": "!=", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "add": "+", "sub": "-", "mul": "*", "div": "/", "__floordiv__": "//", "remainder": "%", "__and__": "&",
    "__or__": "|", "__matmul__": "@", "matmul": "@",
}  # fmt: skip
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


class Handle:
    """A module, class, function or object of a library, as an adapter sees it while it is recorded."""

    def __init__(self, value: Any, recorder: "Recorder", source: Any, name: str = "") -> None:
        self._value, self._recorder, self._source, self._name = value, recorder, source, name

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._value)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._value, name)
        name = f"{self._name}.{name}"
        return found if isinstance(found, _PLAIN) else Handle(found, self._recorder, self._source, name)

    def __getitem__(self, key: Any) -> Any:
        name = f"{self._name}[{key!r}]"  # the grid of a Triton kernel
        return Handle(self._value[key], self._recorder, self._source, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with self._recorder.library():
            result = self._recorder.handed(self._value(*bare(arguments), **bare(keywords)))
        self._recorder.steps.append(Step(self._name, arguments, keywords, result, self._source))
        return result

    def __eq__(self, other: object) -> bool:
        return bool(self._value == bare(other))

    def __hash__(self) -> int:
        return hash(self._value)


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
        # What may have been written to: of a library all that it was given.
        written = mentioned if step.source is not None else ()
        written = step.keywords.get("out", step.arguments[:1]) if step.writes else written
        touched = {id(step.source), *map(owner_of, leaves(mentioned))}
        made = {*map(owner_of, leaves(step.result)), *(touched if step.source is not None else ())}
        if made & objects or _storages(written) & storages:
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


class Program:
    """What was recorded, as statements that depend on nothing else than inputs, named, and each other."""

    def __init__(
        self, recorded: Sequence[Step], inputs: Mapping[str, torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        steps, self._named_so_far = needed(recorded, results), 0
        self._names = {id(tensor): name for name, tensor in inputs.items()}
        self.lines: list[str] = []  # none wider than WIDTH; a device is called DEVICE
        self.modules: dict[str, str] = {}  # what they call, with the names that they give it
        self.used: set[str] = set()  # names of the inputs that they mention
        mentioned = ((at, leaves([step.arguments, step.keywords])) for at, step in enumerate(steps))
        uses = [(at, owner_of(x)) for at, found in mentioned for x in found]
        returned = list(map(owner_of, results))
        self._uses = Counter([*(key for _, key in uses), *returned])
        self._returned = dict(zip(returned, ("output", "lse"), strict=False))
        last = {key: index for index, key in uses}
        effects = [index for index, step in enumerate(steps) if step.source is not None or step.writes]
        for index, step in enumerate(steps):
            # As a statement, or by the name of what it made where that is mentioned once.
            expression = self._expression(step)
            key = owner_of(step.result) if isinstance(step.result, torch.Tensor) else 0
            is_passing = step.source is None and self._uses[key] == 1 and key in last
            if step.writes or not list(leaves(step.result)):
                self.lines += folded(expression)
            elif is_passing and len(expression) <= _INLINED and not any(index < at < last[key] for at in effects):
                self._names[key] = expression
            else:
                target = self._named(step.result)
                self.lines += folded(expression if target in ("_", "*_") else f"{target} = {expression}")
        self.results = tuple(map(self._text, results))  # expressions for what the call returned
        self.used &= inputs.keys()

    def _named(self, result: Any) -> str:
        """Names for what came back: none for what nobody mentions again, or had one before."""
        if isinstance(result, tuple | list):
            names = [self._named(part) for part in result]
            while names[-2:] == ["_", "_"]:
                names.pop()
            return ", ".join([*names[:-1], "*_"] if names[-1] == "_" else names)
        key = owner_of(result)
        if key in self._names or not (isinstance(result, Handle) or self._uses[key]):
            return "_"
        if key in self._returned:
            self._names[key] = self._returned[key]
        else:
            self._named_so_far += 1
            self._names[key] = f"x{self._named_so_far}"
        return self._names[key]

    def _expression(self, step: Step) -> str:
        arguments, name = step.arguments, step.name.removeprefix(METHOD)
        if step.source is not None:
            return f"{self._place(step.source, step.name)}({self._arguments(arguments, step.keywords)})"
        if not step.name.startswith(METHOD):
            function = name.replace("torch.functional.", "torch.").replace("torch._C._nn.", "torch.nn.functional.")
            return f"{function}({self._arguments(arguments, step.keywords)})"
        tensor = self._text(arguments[0])
        if name.endswith(".__get__"):
            return f"{tensor}.{name.removesuffix('.__get__')}"
        if name == "__getitem__":
            return f"{tensor}[{self._index(arguments[1])}]"
        if name == "__setitem__":
            return f"{tensor}[{self._index(arguments[1])}] = {self._text(arguments[2])}"
        if name == "__invert__":
            return f"~{tensor}"
        if len(arguments) == 2 and not step.keywords:
            other = self._text(arguments[1])
            if name in ("__rsub__", "rsub"):
                return f"({other} - {tensor})"
            if name in _OPERATORS:
                return f"({tensor} {_OPERATORS[name]} {other})"
        return f"{tensor}.{name}({self._arguments(arguments[1:], step.keywords)})"

    def _place(self, source: Any, name: str) -> str:
        number = str(len(self.modules) + 1) if self.modules else ""
        is_module = isinstance(source, str)
        root = self.modules.setdefault(source, LIBRARY + number) if is_module else self._known(id(source), source)
        return f"{root}{name}"

    def _known(self, key: int, value: Any) -> str:
        if key not in self._names:
            kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise NotWritable(f"the call depends on a {kind} that was neither given to it nor made by it")
        self.used |= {self._names[key]}
        return self._names[key]

    def _arguments(self, positional: Iterable[Any], keywords: Mapping[str, Any]) -> str:
        return ", ".join([*map(self._text, positional), *(f"{name}={self._text(x)}" for name, x in keywords.items())])

    def _index(self, key: Any) -> str:
        if isinstance(key, tuple) and key:
            return ", ".join(map(self._index, key))
        if isinstance(key, slice):
            ends = ("" if end is None else self._text(end) for end in (key.start, key.stop))
            return ":".join([*ends, *([] if key.step is None else [self._text(key.step)])])
        return "..." if key is Ellipsis else self._text(key)

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._known(owner_of(value), value)
        if isinstance(value, Handle):
            return self._place(value._source, value._name)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._text(key)}: {self._text(x)}" for key, x in value.items()) + "}"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._text, value))}{',' if len(value) == 1 else ''})"
        if is_dataclass(value):
            return f"SimpleNamespace({self._arguments((), vars(value))})"
        return literal(value)
