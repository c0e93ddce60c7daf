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
        """The paths whose bytes on disk differ from those that were loaded, or that are gone."""
        return [path for path, old in self.digests.items() if _digest_here(Path(path)) != old]


def _digest_here(path: Path) -> str | None:
    return file_digest(path) if is_file(path) else None
