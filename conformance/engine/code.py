"""The code of a run's backends: what their processes have loaded, one path with one digest in all of them."""

from dataclasses import dataclass, field
from pathlib import Path

from mla_conformance.driving.loaded import Loaded
from mla_conformance.files.installed import file_digest
from mla_conformance.files.places import is_file


@dataclass
class LoadedCode:
    """Everything that the processes of a run, and of what it goes on with, have loaded.

    Attributes:
        digests: SHA-256 by path.
        conflicts: paths of which processes have loaded different bytes.
    """

    digests: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)

    def add(self, loaded: Loaded) -> None:
        """What a process has loaded; of what was generated meanwhile, only whether it replaced a file that counts."""
        for path, digest in loaded.found.items():
            if self.digests.setdefault(path, digest) != digest:
                self.conflicts.add(path)
        for path, digest in loaded.generated.items():
            if self.digests.get(path, digest) != digest:
                self.conflicts.add(path)

    def changed(self) -> list[str]:
        """What differs on disk from what was loaded, in words."""
        here = {path: file_digest(Path(path)) if is_file(Path(path)) else "absent" for path in self.digests}
        return [f"{path} was {old}, is {here[path]}" for path, old in self.digests.items() if here[path] != old]
