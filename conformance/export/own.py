"""A class of the user's own: what a script loads it by."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.export.program import LIBRARY, NotWritable
from mla_conformance.export.stand_ins import own_files, stand_ins
from mla_conformance.trials.subject import Subject

_OURS = "mla_conformance"


@dataclass(frozen=True)
class OwnClass:
    """A class that is no adapter of this project."""

    module: str  # its module, or the name of its file
    path: Path | None  # its file; None for a module that is installed

    @property
    def files(self) -> list[Path]:
        """Its file, and behind it those of its own that it imports."""
        return own_files(str(self.path or self.module))

    @property
    def needs(self) -> list[str]:
        """What whoever runs the script needs of it, in words."""
        beside = (os.path.relpath(file, self.path.parent) for file in self.files[1:]) if self.path else ()
        return [self.module, *beside]

    def load_lines(self, script: Path) -> list[str]:
        """Statements that load its file, for a script that stands in a certain place.

        A file is not imported by its name, which may be that of another module, or no name at all.
        """
        lines = stand_ins(self.files)
        if self.path is None:
            return lines
        place = os.path.relpath(self.path, script.resolve().parent)
        lines.append(f"file = Path(__file__).resolve().parent / {json.dumps(place)}")
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
