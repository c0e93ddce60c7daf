"""What a user writes for a backend, without importing it or torch: NAME, NAME[variant], MODULE:Class or FILE:Class."""

import ast
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from mla_conformance.backends.foreign import HUB, BackendReferenceError
from mla_conformance.backends.registry import ENUMS, BackendEnum

ENTRY_POINT_GROUP = "mla_conformance.backends"
_MOST_BYTES = 2**24  # of a module's source, which is searched for names
_MAKES_NAMES = re.compile(r"import\s*\*|__getattr__|\b(globals|setattr|exec)\b")


@dataclass(frozen=True)
class BackendReference:
    name: str  # by which it is selected and reported; the class name for a reference to a class
    reference: str  # what replays it, and what another process loads it by

    @property
    def variant(self) -> str:
        return self.name.partition("[")[2].rstrip("]")

    @property
    def file(self) -> Path | None:
        if self.reference.startswith(HUB):
            return hub().adapter_of(self.reference)
        location = self.reference.rpartition(":")[0]
        return Path(location) if location.endswith(".py") else None

    def modules(self) -> list[str]:
        """Where its classes stand, found without importing them: names of modules, or the path of its file."""
        location = self.reference.rpartition(":")[0]
        if location:
            return [str(path) for path in [self.file] if path] if self.reference.startswith(HUB) else [location]
        plugin = plugins().get(self.name)
        paths = [member.get_path(self.variant) for member in self.members()]
        return [plugin.module] if plugin else [path.rpartition(".")[0] for path in paths]

    def members(self) -> list[BackendEnum]:
        """The members of the enumerations that it stands for; none for a class and for an entry point."""
        name = self.name.partition("[")[0]
        if ":" in self.reference or name in plugins():
            return []
        found = [enum.__members__[name] for enum in ENUMS if name in enum.__members__]
        return [m for m in found if (self.variant in m.variants() if self.variant else m.value or m.is_overridden())]


def plugins() -> dict[str, EntryPoint]:
    """The backends of installed packages, by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def known_backends() -> list[BackendReference]:
    """Every registered backend: the enumerations' members, then the entry points."""
    members = [m.name for enum in ENUMS for m in enum if m.name != "CUSTOM" or m.is_overridden()]
    return [BackendReference(name, name) for name in dict.fromkeys([*members, *plugins()])]


LEFT_OUT = {"FLEX_ATTENTION": "compiles for minutes", "EAGER": "is no kernel of a GPU"}
"""Backends that are judged where they are named alone, and why; a CPU is asked for EAGER in any case."""


def usual_backends(on_gpu: bool = False) -> list[BackendReference]:
    """Those that are judged where none is named."""
    left_out = list(LEFT_OUT) if on_gpu else ["FLEX_ATTENTION"]
    return [backend for backend in known_backends() if backend.name not in left_out]


def known_variants() -> list[BackendReference]:
    """Every kernel of the backends that have several, as ``NAME[variant]``."""
    names = [f"{member.name}[{variant}]" for enum in ENUMS for member in enum for variant in member.variants()]
    return [BackendReference(name, name) for name in dict.fromkeys(names)]


def parse_reference(reference: str) -> BackendReference:
    """The backend that ``reference`` names, without importing it; BackendReferenceError of what leads nowhere."""
    if reference.startswith(HUB):
        return BackendReference(*hub().parse(reference))
    if ":" not in reference:
        if reference.endswith(".py"):
            classes = _classes(_existing(reference, reference), reference)
            raise BackendReferenceError(f"'{reference}': expected {reference}:Class; {classes}")
        names = [backend.name for backend in (*known_backends(), *known_variants())]
        if reference not in names:
            further = ", or package.module:Class, or path/to/file.py:Class"
            raise BackendReferenceError(unknown("backend", reference, names, "mla-conformance backends", further))
        return BackendReference(reference, reference)
    location, _, class_name = reference.rpartition(":")
    if location.endswith(".py"):
        path = _existing(location, reference)
        return BackendReference(class_name, f"{path}:{class_name}")
    return BackendReference(class_name, reference)


def require_class(reference: str) -> None:
    """Refuse a class whose name does not stand in its file, of which nothing is carried out, unless it makes names."""
    if reference.startswith(HUB):
        reference = f"{hub().required_adapter(reference)}:Backend"
    location, _, name = reference.rpartition(":")
    if not location.endswith(".py"):
        return
    source = _existing(location, reference).read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{re.escape(name)}\b", source) and not _MAKES_NAMES.search(source):
        raise BackendReferenceError(f"no class {name} in {location}; {_classes(Path(location), location, name)}")


def hub() -> Any:
    """With what looks for packages, which other references do without."""
    return import_module("mla_conformance.backends.hub")


def _existing(location: str, reference: str) -> Path:
    path = Path(os.path.realpath(location))  # a loop of links leads nowhere
    try:
        found = path.stat()
        if (is_file := stat.S_ISREG(found.st_mode)) and found.st_size <= _MOST_BYTES:
            return path
        reason = f"it has {found.st_size:,} bytes" if is_file else "it is a folder, a FIFO, a device or a socket"
    except OSError as error:
        reason = str(error.strerror)
    raise BackendReferenceError(f"'{reference}': no file {path} of Python: {reason}")


def _classes(path: Path, location: str, name: str = "") -> str:
    """What of a file's own classes may be meant: the one that is most like a name, or all of them."""
    try:
        statements = ast.parse(path.read_bytes(), path.name).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"the file is no Python: {error}"
    names = [node.name for node in statements if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    meant = [near] if (near := nearest(name, names)) else names
    return f"did you mean {' or '.join(f'{location}:{each}' for each in meant)}?" if meant else "it defines no class"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty if none is like it."""
    folded = {other.casefold(): other for other in known}
    found = get_close_matches(name.casefold(), folded, n=1)
    return folded[found[0]] if found else ""


def unknown(what: str, name: str, known: Iterable[str], listed_by: str, further: str = "") -> str:
    """What is said of an unknown name: which one was meant, or all there are, and what ``further`` may stand there."""
    names = list(known)
    if meant := nearest(name, names):
        return f"unknown {what} '{name}'; did you mean {meant}? '{listed_by}' lists all"
    return f"unknown {what} '{name}'; expected one of {', '.join(names)}{further}"
