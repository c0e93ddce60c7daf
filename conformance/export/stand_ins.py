"""What a script has in the place of this project's interface, which a kernel of the user's own imports."""

import ast
import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_conformance.backends import slots
from mla_conformance.export.program import NotWritable, folded
from mla_conformance.files.installed import is_followed, source_files

_OURS = "mla_conformance"
_INTERFACE = f"{_OURS}.backends."
_STANDS_IN: dict[str, dict[str, str]] = {
    "interface": {
        "MLAPrefillBackend": "Backend",
        "UnsupportedConfiguration": "ValueError",
        **dict.fromkeys(("MLADimensions", "MLAPrefillSelectorConfig"), "MagicMock()"),
    },
    "decode": {
        "MLADecodeBackend": "Backend",
        **dict.fromkeys(("MLACommonDecodeMetadata", "MLADecodeSelectorConfig"), "object"),
    },
    "checks": dict.fromkeys(("check_decode_operands", "check_operands", "check_unquantised"), "MagicMock()"),
    "kernel": {
        "UnsupportedConfiguration": "ValueError",
        **dict.fromkeys(("expect", "require_declared"), "MagicMock()"),
    },
    "metadata": dict.fromkeys(("ChunkedContextMetadata", "MLACommonPrefillMetadata"), "object"),
    "platform": {"DeviceCapability": "tuple"},
    "slots": {"slots_at": "slots_at", "slots_of": "slots_of"},
    "block_size": {"MultipleOf": "MagicMock()"},
    "graph_support": {"AttentionCGSupport": "MagicMock()"},
    "declaration": dict.fromkeys(("Declaration", "Deviation", "LseClass", "Precision", "Rounding"), "MagicMock()"),
}
"""What a script has in the place of names of the interface; no declaration decides, and nothing is to be refused."""
_UNCALLED = (
    "cache", "compress", "index_space", "indexer", "prepare", "selected", "sparse", "sparse_layer", "topk",
)  # fmt: skip
"""Modules of the roles that no script calls: whatever a file takes from them has the place of a name alone."""
_BASE = """class Backend:  # in the place of the interface's base class: what a constructor and a caller leave behind
    supported_dtypes = [torch.float16, torch.bfloat16]
    supports_dtype = classmethod(lambda cls, dtype: dtype in cls.supported_dtypes)
    __init__ = lambda self, *, vllm_config, **sizes: vars(self).update(sizes)
    prepare_metadata = lambda self, given: vars(self).update(_prefill_metadata=given, _decode_metadata=given)

"""
_MADE = """    name = f"mla_conformance{name}"
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names, __path__=[])"""


def own_files(start: str) -> list[Path]:
    """The file of a module, or a file itself, and of what it imports, those of its package and those of no wheel."""
    package = start.partition(".")[0]

    def is_own(name: str) -> bool:
        return name.partition(".")[0] == package or (not name.startswith(f"{_OURS}.") and is_followed(name))

    return list(source_files([start], is_own).values())


def stand_ins(files: Iterable[Path]) -> list[str]:
    """Statements that put modules in the place of those of this project that files import.

    Raises:
        NotWritable: a file takes something that computes.
    """
    rooms: dict[str, None] = {}
    wanted: dict[str, str] = {}
    for path in files:
        for module, name in _imports(path):
            place, names = _in_place_of(module, name)
            if not names:
                taken = f"{name} of {module}" if name else module
                raise NotWritable(f"{path.name} computes with {taken}, which a script cannot stand in for")
            rooms[place.removeprefix(_OURS)] = None
            wanted |= names
    if not wanted:
        return []
    steps = _source(slots.slots_at, slots.slots_of) if wanted.keys() & _STANDS_IN["slots"].keys() else []
    return [*_BASE.splitlines(), *steps, *_modules(rooms, wanted)]


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """What a file takes from modules of this project: the module and the name; no name of a module as a whole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(f"{_OURS}."):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if f"{alias.name}.".startswith(f"{_OURS}."))


def _in_place_of(module: str, name: str) -> tuple[str, dict[str, str]]:
    """A module, and what stands in for the name that is taken from it: for all of them, if a module is taken whole."""
    room = module.removeprefix(_INTERFACE)
    expression = _STANDS_IN.get(room, {}).get(name, "")
    if room in _UNCALLED and (found := vars(import_module(module)).get(name)):
        expression = "Backend" if inspect.isabstract(found) else "MagicMock()"
    if expression:
        return module, {name: expression}
    whole = f"{module}.{name}".rstrip(".")
    return whole, _STANDS_IN.get(whole.removeprefix(_INTERFACE), {})


def _source(*functions: Any) -> list[str]:
    """Functions as a script holds them, without descriptions and types."""
    lines = []
    for function in functions:
        (node,) = ast.parse(inspect.getsource(function)).body
        assert isinstance(node, ast.FunctionDef)
        node.body, node.returns = node.body[1:], None
        for argument in node.args.args:
            argument.annotation = None
        lines += [*ast.unparse(node).splitlines(), ""]
    return lines


def _modules(rooms: Iterable[str], names: dict[str, str]) -> list[str]:
    """Statements that make modules, each with all of these names, and the packages that they are in."""
    given = ", ".join(f"{name}={expression}" for name, expression in names.items())
    listed = ", ".join(f'"{room}"' for room in ("", _INTERFACE[len(_OURS) : -1], *rooms))
    return [*folded(f"names = dict({given})"), *folded(f"for name in ({listed}):"), *_MADE.splitlines()]
