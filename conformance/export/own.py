"""A class of the user's own: what a script loads it by, and has in the place of the interface that it imports."""

import ast
import inspect
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mla_conformance.backends import hub, packaged, slots
from mla_conformance.export.program import LIBRARY, NotWritable, folded
from mla_conformance.files.installed import imports, is_followed, source_files
from mla_conformance.trials.subject import Subject

_OURS = "mla_conformance"
_INTERFACE = f"{_OURS}.backends."
_STANDS_IN = {
    "interface": "MLAPrefillBackend=Backend UnsupportedConfiguration=ValueError MLADimensions MLAPrefillSelectorConfig",
    "decode": "MLADecodeBackend=Backend MLACommonDecodeMetadata=object MLADecodeSelectorConfig=object",
    "checks": "check_decode_operands check_operands check_unquantised",
    "kernel": "UnsupportedConfiguration=ValueError expect require_declared",
    "metadata": "ChunkedContextMetadata=object MLACommonPrefillMetadata=object",
    "platform": "DeviceCapability=tuple",
    "slots": "slots_at=slots_at slots_of=slots_of",
    "block_size": "MultipleOf",
    "graph_support": "AttentionCGSupport",
    "declaration": "Declaration Deviation LseClass Precision Rounding",
}
"""What a script has in the place of names of the interface, by module; where nothing is said, what takes every call.

No declaration decides, and nothing is to be refused."""
# Modules of the roles that no script calls: whatever a file takes from them has the place of a name alone.
_UNCALLED = ["cache", "compress", "indexer", "prepare", "selected", "sparse", "sparse_layer", "topk", "tree"]
_BASE = """class Backend:  # in the place of the interface's base class: what a constructor and a caller leave behind
    supported_dtypes = [torch.float16, torch.bfloat16]
    supports_dtype = classmethod(lambda cls, dtype: dtype in cls.supported_dtypes)
    __init__ = lambda self, *, vllm_config, **sizes: vars(self).update(sizes)
    prepare_metadata = lambda self, given: vars(self).update(_prefill_metadata=given, _decode_metadata=given)

"""
_MADE = """    name = f"mla_conformance{name}"
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(names, __path__=[])"""


def stand_ins(files: Iterable[Path]) -> list[str]:
    """Statements that put modules in the place of those of this project that files import, if nothing computes."""
    rooms: dict[str, None] = {}
    wanted: dict[str, str] = {}
    for path in files:
        for module, name in (each for each in imports(path) if f"{each[0]}.".startswith(f"{_OURS}.")):
            place, names = _in_place_of(module, name)
            if not names:
                what = f"{name} of {module}" if name else module
                raise NotWritable(f"{path.name} computes with {what}, which a script cannot stand in for")
            rooms[place.removeprefix(_OURS)] = None
            wanted |= names
    if not wanted:
        return []
    lines = _BASE.splitlines()
    for function in (slots.slots_at, slots.slots_of) if wanted.keys() & _stands_in("slots").keys() else ():
        (node,) = ast.parse(inspect.getsource(function)).body  # without description and types
        assert isinstance(node, ast.FunctionDef)
        node.body, node.returns = node.body[1:], None
        for argument in node.args.args:
            argument.annotation = None
        lines += [*ast.unparse(node).splitlines(), ""]
    given = ", ".join(f"{name}={expression}" for name, expression in wanted.items())
    listed = ", ".join(f'"{room}"' for room in ("", _INTERFACE[len(_OURS) : -1], *rooms))
    return [*lines, *folded(f"names = dict({given})"), *folded(f"for name in ({listed}):"), *_MADE.splitlines()]


def _in_place_of(module: str, name: str) -> tuple[str, dict[str, str]]:
    """A module, and what stands in for the name that is taken from it: for all of them, if a module is taken whole."""
    room = module.removeprefix(_INTERFACE)
    expression = _stands_in(room).get(name, "")
    if room in _UNCALLED and (found := vars(import_module(module)).get(name)):
        expression = "Backend" if inspect.isabstract(found) else "MagicMock()"
    if expression:
        return module, {name: expression}
    whole = f"{module}.{name}".rstrip(".")
    return whole, _stands_in(whole.removeprefix(_INTERFACE))


def _stands_in(room: str) -> dict[str, str]:
    said = (each.partition("=") for each in _STANDS_IN.get(room, "").split())
    return {name: expression or "MagicMock()" for name, _, expression in said}


@dataclass(frozen=True)
class OwnClass:
    module: str  # its module, or the name of its file
    path: Path | None  # its file; None for a module that is installed

    @property
    def files(self) -> list[Path]:
        """Its file, and of what it imports, those of its package and those of no wheel."""
        start = str(self.path or self.module)
        package = start.partition(".")[0]

        def is_own(name: str) -> bool:
            return name.partition(".")[0] == package or (not name.startswith(f"{_OURS}.") and is_followed(name))

        return list(source_files([start], is_own).values())

    @property
    def needs(self) -> list[str]:
        """What whoever runs the script needs of it."""
        beside = (os.path.relpath(file, self.path.parent) for file in self.files[1:]) if self.path else ()
        return [self.module, *beside]

    def load_lines(self, script: Path) -> list[str]:
        """Statements that load its file, for a script that stands in a certain place; by its place, not its name."""
        lines = stand_ins(self.files)
        if self.path is None:
            return lines
        place = os.path.relpath(self.path, script.resolve().parent)
        beside = f"Path(__file__).resolve().with_name({json.dumps(self.path.name)})"
        return [
            *lines,
            f"file = Path(__file__).resolve().parent / {json.dumps(place)}",
            *([f"file = file if file.exists() else {beside}"] if place != self.path.name else []),
            "sys.path.append(str(file.parent))",
            "spec = importlib.util.spec_from_file_location(file.name, file)",
            f"{LIBRARY} = sys.modules[file.name] = importlib.util.module_from_spec(spec)",
            f"spec.loader.exec_module({LIBRARY})",
        ]


def own_class(subject: Subject, loaded: Any) -> OwnClass | None:
    """The class, if it is a library of its own; None for an adapter, of which the script shows what it calls."""
    module = loaded.__module__
    if module.startswith(f"{_OURS}.backends.generations"):
        raise NotWritable(
            "its class is driven through another generation of the interface, which a script does not hold"
        )
    if subject.backend.reference.startswith(hub.HUB):
        raise NotWritable("its kernel is in a hub's repository, which a script does not hold")
    if issubclass(loaded, packaged.LibraryKernel) or module.startswith(f"{_OURS}."):
        return None
    path = subject.backend.file
    return OwnClass(path.name if path else module, path)
