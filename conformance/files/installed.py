"""What is installed, so exactly that another build can be told apart: wheels by their files, checkouts by commit.

What is in no wheel is told by the Python files that it is made of, found by their imports, none of which is made. A
digest of what a source says notices when it says something else, and only then.
"""

import ast
import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from mla_conformance.files.places import file_digest, is_file, sites

_NO_PROGRAMS = ("-c", "core.fsmonitor=", "-c", f"core.hooksPath={os.devnull}")
_HARNESS, _ADAPTERS = "mla_conformance.", "mla_conformance.backends."


class Installed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    build: str = ""  # tags of its wheel, for which interpreter and platform it was built
    # SHA-256 of what its wheel's RECORD says of the package's files; where there is no wheel, of the files
    files: str = ""
    # files of the package that are not what the RECORD says: of another size or, a module, of other bytes
    altered: tuple[str, ...] = ()
    commit: str = ""  # the commit of the checkout that an editable installation leads to
    clean: bool | None = None  # whether nothing in that checkout differs from its commit; None where there is none


def installed(name: str) -> Installed | None:
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):  # or no name at all
        return None
    if folder := _editable(found):
        commit, clean = commit_of(folder)
        if commit:
            return Installed(commit=commit, clean=clean)
        sources = {path.relative_to(folder): path for path in folder.rglob("*") if path.suffix in (".py", ".so")}
        # Not of an environment that stands in the checkout, or of a tool.
        foreign = {name for name in sources if any(part[0] == "." or part == "site-packages" for part in name.parts)}
        return Installed(files=files_digest({x.as_posix(): path for x, path in sources.items() if x not in foreign}))
    # Of a wheel by the package's own files: installers write scripts, and what they say of themselves, as they like.
    tags = [line.partition(":")[2].strip() for line in (found.read_text("WHEEL") or "").splitlines() if "Tag:" in line]
    lines = (line for line in csv.reader((found.read_text("RECORD") or "").splitlines()) if len(line) == 3 and line[1])
    listed = [line for line in lines if not line[0].startswith("..") and ".dist-info/" not in line[0]]
    content = "\n".join(sorted(f"{path} {reported}" for path, reported, _ in listed))
    altered = []  # by the sizes of files that are there, and the bytes of modules; loaded libraries have own digests
    for file, reported, size in listed:
        path, algorithm = Path(str(found.locate_file(file))), reported.partition("=")[0]
        if not path.is_file():
            continue  # nothing can have run it
        other = size.isdigit() and path.stat().st_size != int(size)
        if not other and path.suffix == ".py":
            with path.open("rb") as opened:
                digest = base64.urlsafe_b64encode(hashlib.file_digest(opened, algorithm).digest())
            other = f"{algorithm}={digest.rstrip(b'=').decode()}" != reported
        altered += [file] if other else []
    return Installed(" ".join(tags), hashlib.sha256(content.encode()).hexdigest(), tuple(altered))


def _editable(found: Distribution) -> Path | None:
    reported = json.loads(found.read_text("direct_url.json") or "{}")
    if not reported.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(reported["url"]).path))


_Told = tuple[str, bool | None, Mapping[str, Path], str]  # commit, whether clean, tracked files, their digest
_told: dict[Path, _Told] | None = None  # of the harness and editable installations, while git is not to be asked


@contextmanager
def git_asked_before() -> Iterator[None]:
    """Ask git now of all that may be asked, and not again: a kernel may write where git finds programs to run."""
    global _told
    told: dict[Path, _Told] = {}
    for folder in {harness_folder(), *filter(None, map(_editable, distributions()))}:
        tracked = {name: folder / name for name in filter(None, (_git(folder, "ls-files", "-z") or "").split("\0"))}
        told[folder] = (*commit_of(folder), tracked, files_digest(tracked))
    _told = told
    try:
        yield
    finally:
        _told = None


def harness_folder() -> Path:
    return Path(str(files("mla_conformance"))).parent


def commit_of(folder: Path) -> tuple[str, bool | None]:
    if _told is not None:
        said, clean, tracked, digest = _told.get(folder, ("", None, {}, ""))
        return said, clean and files_digest(tracked) == digest
    commit, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    return commit or "", None if status is None else not status


def files_digest(files: Mapping[str, Path]) -> str:
    reported = [f"{name} {file_digest(path)}" for name, path in sorted(files.items()) if path.is_file()]
    return hashlib.sha256("\n".join(reported).encode()).hexdigest()


def _git(folder: Path, *command: str) -> str | None:
    """What git says of the checkout that this very folder is; None without git, and of any other folder."""
    if not (folder / ".git").exists():
        return None
    try:
        asked = ["git", "-C", str(folder), *_NO_PROGRAMS, *command]
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment = {**own, "GIT_CONFIG_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(asked, capture_output=True, timeout=60, check=True, env=environment)
        return done.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.SubprocessError):
        return None


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 of these modules, named or by a path, and of what they import that no wheel holds, by name.

    Of the harness only its adapters are followed: its other files have digests of their own, and those of a wheel the
    digest of the wheel. What the harness says counts, and of any other file every byte.
    """
    found = source_files(modules)
    return {source_name(name): source_digest(name, found[name]) for name in sorted(found, key=source_name)}


def is_followed(name: str) -> bool:
    if name.startswith(_HARNESS):
        return name.startswith(_ADAPTERS)
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == _HARNESS[:-1]:
        return False
    path = module_file(name)
    return path is not None and not any(path.resolve().is_relative_to(site) for site in sites())


def source_files(modules: Iterable[str], follows: Callable[[str], bool] = is_followed) -> dict[str, Path]:
    found: dict[str, Path] = {}
    left = list(modules)
    while left:
        name = left.pop()
        path = module_file(name)
        if path is not None and path.suffix == ".py" and name not in found:
            found[name] = path
            parts = [] if name.endswith(".py") else name.split(".")
            packages = [".".join(parts[:count]) for count in range(1, len(parts))]  # which are imported before it
            taken = imports(path, name if path.stem == "__init__" else name.rpartition(".")[0])
            names = (each for module, own in taken for each in (module, f"{module}.{own}".rstrip(".")))
            left += filter(follows, [*dict.fromkeys(names), *packages])
    return found


def source_name(module: str) -> str:
    return Path(module).name if module.endswith(".py") else module


def source_digest(module: str, path: Path) -> str:
    return meaning_digest([path]) if module.startswith(_HARNESS) else file_digest(path)


def module_file(name: str) -> Path | None:
    """The file of a module, which is not imported, nor is a package that it is in; None if there is none."""
    if name.endswith(".py"):
        return Path(name) if is_file(Path(name)) else None
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    top, *rest = name.split(".")
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])  # as where a backend is imported
    except ValueError:  # a module in sys.modules without a spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name, locations = f"{spec.name}.{part}", list(spec.submodule_search_locations)
        # An editable installation of the harness finds its folders in a way of its own; its packages are imported here.
        spec = find_spec(name) if name.startswith(_HARNESS) else PathFinder.find_spec(name, locations)
    path = Path(spec.origin) if spec and spec.origin else None
    return path if path and is_file(path) else None


def imports(path: Path, package: str = "") -> Iterator[tuple[str, str]]:
    """Each module that a file of a package imports from, and the name that it takes; none of a module taken whole."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((module, alias.name) for alias in node.names)


def meaning_digest(paths: Iterable[Path], *texts: str) -> str:
    """SHA-256 of what modules and tables of numbers say, behind some texts, whatever their comments and layout."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr(text).encode())
    for path in sorted(paths, key=lambda path: (path.name, path.parent.name)):
        digest.update(f"({path.name!r}, {_said(path.read_text(encoding='utf-8'), path.suffix)})".encode())
    return digest.hexdigest()


@cache
def _said(text: str, suffix: str) -> str:
    return repr(meaning(text, suffix))


def meaning(text: str, suffix: str = ".py") -> Any:
    return tomllib.loads(text) if suffix == ".toml" else _plain(ast.parse(text))


def _plain(node: Any) -> Any:
    """A syntax tree as lists; empty fields are left out, since later Pythons have more of them."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_description(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def _is_description(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
