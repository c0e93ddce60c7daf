"""A class of the user's own: what a script loads it by, and what stands in for the interface that it derives from."""

import ast
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.export.program import LIBRARY, NotWritable, folded
from mla_conformance.trials.subject import Subject

_OURS = "mla_conformance"
_STANDS_IN = {
    f"{_OURS}.backends.interface": {"MLAPrefillBackend": "Backend", "UnsupportedConfiguration": "ValueError"},
    f"{_OURS}.backends.decode": {"MLADecodeBackend": "Backend"},
    f"{_OURS}.backends.kernel": {"UnsupportedConfiguration": "ValueError"},
    f"{_OURS}.backends.platform": {"DeviceCapability": "tuple"},
    f"{_OURS}.backends.declaration": {
        name: "MagicMock()" for name in ("Declaration", "Deviation", "LseClass", "Precision", "Rounding")
    },
}
"""Where names of this project may come from, and what a script has in their place; what is declared decides nothing."""
_BASE = """class Backend:  # in the place of the interface's base class: what a constructor and a caller leave behind
    supported_dtypes = [torch.float16, torch.bfloat16]
    supports_dtype = classmethod(lambda cls, dtype: dtype in cls.supported_dtypes)
    __init__ = lambda self, *, vllm_config, **sizes: vars(self).update(sizes)
    prepare_metadata = lambda self, given: vars(self).update(_prefill_metadata=given, _decode_metadata=given)

"""


@dataclass(frozen=True)
class OwnClass:
    """A class that is no adapter of this project.

    Attributes:
        module: its module, or the name of its file.
        path: its file; None for a module that is installed.
    """

    module: str
    path: Path | None

    def load_lines(self, script: Path) -> list[str]:
        """Statements that load its file, for a script that stands in a certain place.

        It is not imported by its name, which may be that of another module, or no name at all.
        """
        if self.path is None:
            return []
        place = os.path.relpath(self.path, script.resolve().parent)
        lines = [*_stand_in(self.path), f"file = Path(__file__).resolve().parent / {json.dumps(place)}"]
        if place != self.path.name:
            beside = f"Path(__file__).resolve().with_name({json.dumps(self.path.name)})"
            lines.append(f"file = file if file.exists() else {beside}")
        return [
            *lines,
            "sys.path.append(str(file.parent))",
            "spec = importlib.util.spec_from_file_location(file.name, file)",
            f"{LIBRARY} = sys.modules[file.name] = importlib.util.module_from_spec(spec)",
            f"spec.loader.exec_module({LIBRARY})",
        ]


def own_class(subject: Subject, loaded: Any) -> OwnClass | None:
    """The class, if it is a library of its own; None for an adapter, of which the script shows what it calls.

    Raises:
        NotWritable: a class of another generation of the interface, or a family of kernels.
    """
    module = loaded.__module__
    if module.startswith(f"{_OURS}.backends.generations"):
        raise NotWritable(
            "its class is driven through another generation of the interface, which a script does not hold"
        )
    if issubclass(loaded, LibraryKernel) or module.startswith(f"{_OURS}."):
        return None
    location = subject.backend.reference.rpartition(":")[0]
    path = Path(location) if location.endswith(".py") else None
    return OwnClass(path.name if path else module, path)


def _stand_in(path: Path) -> list[str]:
    """Statements that put modules in the place of those of this project that a file imports."""
    wanted = list(dict.fromkeys(_imports(path)))
    if not wanted:
        return []
    foreign = [f"{name} of {module}" for module, name in wanted if name not in _STANDS_IN.get(module, {})]
    if foreign:
        raise NotWritable(f"{path.name} computes with {', '.join(foreign)}, which a script cannot stand in for")
    lines = _BASE.splitlines()
    for module in dict.fromkeys(module for module, _ in wanted):
        names = ", ".join(f"{name}={_STANDS_IN[module][name]}" for other, name in wanted if other == module)
        lines += folded(f'sys.modules["{module}"] = SimpleNamespace({names})')
    return lines


def _imports(path: Path) -> list[tuple[str, str]]:
    """Names that a file takes from modules of this project."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _OURS:
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(each.name, each.name) for each in node.names if each.name.split(".")[0] == _OURS]
    return found
