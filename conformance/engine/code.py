"""The code of a run's backends: what their processes have loaded, one path with one digest in all of them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from mla_conformance.driving.loaded import Loaded
from mla_conformance.files.installed import file_digest, harness_files
from mla_conformance.files.places import is_file, place_of, sites


def _import_folders() -> list[Path]:
    """The folders that a backend's modules are looked for in, the deepest first."""
    folders = {Path.cwd(), *(Path(entry).resolve() for entry in sys.path)}
    return sorted(folders, key=lambda folder: len(folder.parts), reverse=True)


@dataclass
class LoadedCode:
    """Everything that the processes of a run, and of what it goes on with, have loaded.

    Attributes:
        digests: SHA-256 by path.
        conflicts: paths of which processes have loaded different bytes.
        folders: of modules, which are called alike wherever these stand.
    """

    digests: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=_import_folders)

    def add(self, loaded: Loaded) -> None:
        """What a process has loaded; of what was generated meanwhile, only whether it replaced a file that counts."""
        for path, digest in loaded.found.items():
            if self.digests.setdefault(path, digest) != digest:
                self.conflicts.add(path)
        for path, digest in loaded.generated.items():
            if self.digests.get(path, digest) != digest:
                self.conflicts.add(path)

    @property
    def own(self) -> dict[str, str]:
        """SHA-256, by place, of the modules that are neither the harness's nor in a folder of wheels."""
        shipped = {path.resolve() for path in harness_files().values()}
        modules = {Path(path): digest for path, digest in self.digests.items() if ".so" not in Path(path).suffixes}
        return {
            place_of(path, next((folder / "_" for folder in self.folders if path.is_relative_to(folder)), None)): digest
            for path, digest in sorted(modules.items())
            if path not in shipped and not any(path.is_relative_to(site) for site in sites())
        }

    def changed(self) -> list[str]:
        """The paths whose bytes on disk differ from those that were loaded, or that are gone."""
        return [path for path, old in self.digests.items() if _digest_here(Path(path)) != old]


def _digest_here(path: Path) -> str | None:
    return file_digest(path) if is_file(path) else None
