"""A recording as source text: the steps that a result needs, in order, each written as a person would write it."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import IntEnum, StrEnum
from typing import Any

import torch

from mla_conformance.export.recording import METHOD, Handle, Step, bare, leaves, needed, owner_of

WIDTH = 112  # characters of a line at most, unless it cannot be broken
LIBRARY = "library"  # a script's own name for the module that it calls, with a number behind it for every further one
_INLINED = 72  # characters of an expression that stands within another one at most
_OPERATORS = {
    "__eq__": "==", "eq": "==", "__ne__": "!=", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "add": "+", "sub": "-", "mul": "*", "div": "/", "__floordiv__": "//", "remainder": "%", "__and__": "&",
    "__or__": "|", "__matmul__": "@", "matmul": "@",
}  # fmt: skip


class NotWritable(ValueError):
    """What cannot be put into a script, as one sentence."""


class TooLong(NotWritable):
    """What would fit into a script, were the case smaller."""


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


def literal(value: Any) -> str:
    if isinstance(value, torch.device):
        return '"cpu"' if value.type == "cpu" else "DEVICE"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, IntEnum | StrEnum):
        return literal(value.value)  # a library takes the number or the text as well
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value).replace("'", '"') if isinstance(value, str) else repr(value)
    raise NotWritable(f"the call has an argument of type {type(bare(value)).__name__}, which cannot be written down")


def folded(text: str) -> list[str]:
    """A statement in lines of WIDTH characters: broken between the arguments of its outer call, else in brackets."""
    if len(text) <= WIDTH:
        return [text]
    lines = [""]
    # Cut behind its first bracket and behind each comma that stands in one bracket alone.
    depth, start, parts = 0, 0, list[str]()
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 1 and (character == "," or (character in "([{" and not parts)):
            parts.append(text[start : at + 1 + (character == ",")])
            start = at + 1 + (character == ",")
    for part in [*parts, text[start:]]:
        lines[-1:] = [lines[-1] + part] if len(lines[-1] + part.rstrip()) <= WIDTH else [lines[-1], f"    {part}"]
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    return [row for line in lines for row in wrapper.wrap(line)]


def assigned(values: Mapping[str, str]) -> list[str]:
    """Names that get the values of expressions, as many in a line as there is room for."""

    def assignment(row: Mapping[str, str]) -> str:
        return f"{', '.join(row)} = {', '.join(row.values())}"

    rows: list[dict[str, str]] = []
    for name, value in values.items():
        if not rows or len(assignment(rows[-1] | {name: value})) > WIDTH:
            rows.append({})
        rows[-1][name] = value
    return [line for row in rows for line in folded(assignment(row))]
