"""Which files decide a verdict, and which the process of a backend loads as code, each with its bytes' digest.

A module that no wheel lists is compiled from the source that is digested: cached bytecode may be of another one. What
came to be on disk while the run went on is its generator's, which is loaded itself.
"""

import _imp
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.resources import files
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any
from zipimport import zipimporter

import msgspec

from mla_conformance.backends.roles import outside
from mla_conformance.files.places import file_digest, harness_files, is_file, place_of, read_if_there, sites

_LOADERS: tuple[Any, ...] = (SourceFileLoader, SourcelessFileLoader, zipimporter)
_LIBRARY = sysconfig.get_path("stdlib")
_DECIDING = ("cases", "vocabulary", "problems", "driving", "judging", "roles", "trials")
"""Rooms: what a case asks for, its procedure and its data, and what judges it; the reference has its own digest."""


def judging_sources() -> list[Path]:
    root = Path(str(files("mla_conformance")))
    return [path for room in _DECIDING for path in sorted((root / room).rglob("*")) if path.suffix in (".py", ".toml")]


def loaded_libraries() -> set[str]:
    return set(filter(_is_library, _mapped()))


def _mapped() -> set[str]:
    return {line.rpartition(" ")[2] for line in read_if_there(Path("/proc/self/maps")).splitlines()}


def _is_library(path: str) -> bool:
    return ".so" in Path(path).suffixes and Path(path).is_file()


class Loaded(msgspec.Struct, frozen=True):
    found: dict[str, str] = {}  # those that were there when the run began
    generated: dict[str, str] = {}  # those that came to be, or were written over, since


@dataclass
class LoadedFiles:
    new: Loaded = field(default_factory=Loaded)  # since it was last told
    mapped: set[str] = field(default_factory=set)
    began: float | None = None

    def watch(self, began: float) -> None:
        self.began, self.mapped = began, _mapped()
        # The harness's packages, wherever an editable installation has them.
        packages = ("mla_conformance", "mla_conformance.backends", "mla_conformance.reference")
        self._trusted = tuple(f"{Path(str(files(package))).resolve()}/" for package in packages)
        self._sites = sites()
        _imp.check_hash_based_pycs = "always"
        for loader in _LOADERS:
            loader.get_code = self._noting(loader.get_code)

    def _noting(self, get_code: Callable[[Any, str], CodeType]) -> Callable[[Any, str], CodeType]:
        def noted(loader: Any, name: str) -> CodeType:
            archive = getattr(loader, "archive", None)
            path = archive or loader.get_filename(name)
            data = Path(path).read_bytes()
            top = name.partition(".")[0]  # Python's own library, or how this Python was built
            if not (path.startswith(_LIBRARY) and (top in sys.stdlib_module_names or top.startswith("_sysconfigdata"))):
                self.note(path, hashlib.sha256(data).hexdigest())
            if archive or not isinstance(loader, SourceFileLoader):
                return get_code(loader, name)
            # What is not the harness's or Python's, and in no wheel's list of files.
            own, among = Path(path).resolve(), self._sites
            known = str(own).startswith((*self._trusted, f"{_LIBRARY}/")) and "site-packages" not in own.parts
            if known or any(own.is_relative_to(site) and str(own.relative_to(site)) in _listed(site) for site in among):
                return get_code(loader, name)
            return loader.source_to_code(data, path)

        return noted

    def note(self, path: str, digest: str) -> None:
        generated = Path(path).stat().st_ctime > (self.began or 0)
        (self.new.generated if generated else self.new.found)[str(Path(path).resolve())] = digest


@cache
def _listed(site: Path) -> frozenset[str]:
    records = [path.read_text(encoding="utf-8", errors="replace") for path in site.glob("*.dist-info/RECORD")]
    return frozenset(line.partition(",")[0] for record in records for line in record.splitlines())


LOADED = LoadedFiles()  # of this process


def newly_loaded() -> Loaded:
    if LOADED.began is None:
        return Loaded()
    mapped = _mapped()
    for path in filter(_is_library, mapped - LOADED.mapped):
        LOADED.note(path, file_digest(Path(path)))
    told, LOADED.new, LOADED.mapped = LOADED.new, Loaded(), LOADED.mapped | mapped
    return told


_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "packaging", "rich")
"""What a report and a certificate are made with, beside the harness and Python."""
_RUN = (".pth", ".py", ".so")


@dataclass
class LoadedCode:
    digests: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)  # paths of which processes have loaded different bytes
    # that modules are looked for in; asked for when the run begins, since the current one may go
    folders: list[Path] = field(default_factory=lambda: [Path.cwd(), *(Path(entry).resolve() for entry in sys.path)])

    def add(self, loaded: Loaded) -> None:
        """What a process has loaded; of what was generated meanwhile, only whether it replaced a file that counts."""
        found = [(path, digest, self.digests.setdefault(path, digest)) for path, digest in loaded.found.items()]
        made = [(path, digest, self.digests.get(path, digest)) for path, digest in loaded.generated.items()]
        self.conflicts |= {path for path, digest, before in (*found, *made) if digest != before}

    def changed(self) -> list[str]:
        return [x for x, old in self.digests.items() if not is_file(Path(x)) or file_digest(Path(x)) != old]

    @property
    def own(self) -> dict[str, str]:
        """SHA-256, by place, of the modules that are neither the harness's nor in a folder of wheels.

        Their place is in the deepest folder that modules are looked for in, so that it is called alike wherever it is.
        """
        shipped, found = {path.resolve() for path in harness_files().values()}, dict[str, str]()
        for path, digest in sorted((Path(path), digest) for path, digest in self.digests.items()):
            if not (".so" in path.suffixes or path in shipped or any(path.is_relative_to(site) for site in sites())):
                around = [folder for folder in self.folders if path.is_relative_to(folder)]
                deepest = max(around, key=lambda folder: len(folder.parts), default=None)
                found[place_of(path, deepest and deepest / "_")] = digest
        return found


def deciding_files(before: Mapping[Path, str | int] = MappingProxyType({})) -> dict[Path, str | int]:
    """SHA-256 of the harness's files and of what is loaded of its libraries, or was ``before``; and what stands beside.

    That is Python's library and folders of wheels, with the nanosecond of each last change. A file that is written over
    changes nothing of the run that goes on, since what decides is loaded before a backend is. The run is refused all
    the same: it may have been read by halves, and what Python runs at its start would decide the next one.
    """
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]
    others = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
    others += [Path(outside().partition("@")[0])] if outside() else []
    if before:
        others = [path for path, held in before.items() if isinstance(held, str)]
    held = {path: file_digest(path) for path in (*harness_files().values(), *others) if path.is_file()}
    folders: list[str | Path] = [*sites()]
    for folder, inner, _ in os.walk(_LIBRARY):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        folders.append(folder)
    beside = (entry for folder in folders for entry in os.scandir(folder) if entry.name.endswith(_RUN))
    return {Path(entry.path): entry.stat(follow_symlinks=False).st_ctime_ns for entry in beside} | held
