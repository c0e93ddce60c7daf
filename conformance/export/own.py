"""A class of the user's own: what a script loads it by, and what stands in for the interface that it derives from."""

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.driving.subject import Subject
from mla_conformance.export.literals import NotWritable, folded

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

    def __init__(self, *, vllm_config, **sizes):
        vars(self).update(sizes)

    def prepare_metadata(self, metadata):
        self._prefill_metadata = self._decode_metadata = metadata

"""


@dataclass(frozen=True)
class OwnClass:
    """A class that is no adapter of this project.

    Attributes:
        loaded: the class.
        module: what a script imports it from.
        path: its file; None for a module that is installed.
    """

    loaded: Any
    module: str
    path: Path | None

    def load_lines(self, script: Path) -> list[str]:
        """Statements that make its module importable, for a script that stands in a certain place."""
        if self.path is None:
            return []
        folder = os.path.relpath(self.path.parent, script.resolve().parent)
        at = "Path(__file__).resolve().parent" + ("" if folder == "." else f' / "{folder}"')
        return [*_stand_in(self.path), f"sys.path.insert(0, str({at}))"]


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
    if path is not None and not path.stem.isidentifier():
        raise NotWritable(f"{path.name} cannot be imported by that name; give the file a name of letters and digits")
    return OwnClass(loaded, path.stem if path else module, path)


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
