"""What a file is called on every machine, and which modules a process that decides loads late.

None that was written since its run began: a kernel may write where modules lie, Python's library included, and what it
wrote would decide along. Nor is bytecode read, which may be of another source.
"""

import codecs
import contextlib
import os
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from pathlib import Path
from typing import Any

_OF_A_MACHINE = ("/usr/", "/lib", "/tmp/")
_PACKAGES = ("mla_conformance", *(f"mla_conformance.{floor}" for floor in ("backends", "reference", "fixtures")))
_NOT_SHIPPED = {"tests", "__pycache__"}
_with_wheels: dict[tuple[str, ...], tuple[Path, ...]] = {}


def place_of(path: Path, beside: Path | None = None) -> str:
    """The name by which another machine finds a file; beside that of the backend it begins with ``./``."""
    folders = [("", site) for site in sites()]
    folders += [("./", beside.parent)] if beside else []
    for name, folder in (*folders, ("~/", Path.home())):
        if path.is_relative_to(folder):
            return name + path.relative_to(folder).as_posix()
    return str(path)


def find_place(name: str, beside: Path | None = None) -> Path | None:
    if name.startswith("./"):
        candidates = [beside.parent / name] if beside else []
    elif name.startswith(("/", "~/")):
        candidates = [Path(name).expanduser()]
    else:
        candidates = [site / name for site in sites()]
    return next(filter(is_file, candidates), None)


def read_if_there(path: Path) -> str:
    """What the system says in a file that not every system has, and that may go with a process; else nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_file(path: Path) -> bool:
    """Whether a file of this name is there; a name that none can have, such as an endless one, is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_of_the_machine(name: str) -> bool:
    """Whether a file is of the system, or was compiled into a cache: another machine has another one by rights."""
    compiled = name.startswith(("/", "~")) and any("cache" in part for part in Path(name).parts[:-1])
    return compiled or name.startswith(_OF_A_MACHINE)


def forget_current_folder() -> None:
    """Look for modules in folders that are named whole, and not where `python -m` looks first: the current folder."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).is_absolute()]
    with contextlib.suppress(OSError):  # in a folder that is gone there is nothing to be found
        if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
            del sys.path[0]


def sites() -> tuple[Path, ...]:
    """The folders that modules are imported from and wheels are unpacked into, in this order."""
    entries = tuple(sys.path)
    if entries not in _with_wheels:
        folders = dict.fromkeys(Path(entry).resolve() for entry in entries)
        _with_wheels[entries] = tuple(folder for folder in folders if next(folder.glob("*.dist-info"), None))
    return _with_wheels[entries]


def file_digest(path: Path) -> str:
    import hashlib  # not above: this file is read while the current folder may stand before Python's library

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def harness_files() -> dict[str, Path]:
    from importlib.resources import files  # not above: this file is read while the current folder may stand before it

    found: dict[str, Path] = {}
    for package in _PACKAGES:
        top = str(files(package))
        for folder, inner, names in os.walk(top):
            inner[:] = set(inner) - _NOT_SHIPPED  # which hold most files of a checkout
            room = package.replace(".", "/") + folder.removeprefix(top).replace(os.sep, "/")
            paths = {f"{room}/{name}": Path(folder, name) for name in names if name not in _NOT_SHIPPED}
            found |= {name: path for name, path in paths.items() if path.is_file()}
    return found


_ENCODINGS = ("ascii", "latin_1", "unicode_escape")  # beside UTF-8, modules that are loaded when they are used first
_LIBRARY = sysconfig.get_path("platstdlib")
_get_code, _create_module = SourceFileLoader.get_code, ExtensionFileLoader.create_module


def refuse_written_since(began: float) -> None:
    """Load no such module from now on; of compiled ones, which others than kernels write into caches, Python's own."""
    for name in _ENCODINGS:
        codecs.lookup(name)

    def get_code(loader: SourceFileLoader, name: str) -> Any:
        path = loader.get_filename(name)
        source = loader.get_data(path)
        _require_older(path, began)  # which is what was read, then
        return loader.source_to_code(source, path)

    def create_module(loader: ExtensionFileLoader, spec: Any) -> Any:
        if loader.path.startswith(_LIBRARY):
            _require_older(loader.path, began)
        return _create_module(loader, spec)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
    ExtensionFileLoader.create_module = create_module  # type: ignore[assignment,method-assign]


def load_all_again() -> None:
    SourceFileLoader.get_code = _get_code  # type: ignore[method-assign]
    ExtensionFileLoader.create_module = _create_module  # type: ignore[method-assign]


def _require_older(path: str, began: float) -> None:
    if os.stat(path).st_ctime > began:  # noqa: PTH116 - what pathlib loads late would come back here
        raise ImportError(f"{path} was written while the run judged, and is not loaded", path=path)
