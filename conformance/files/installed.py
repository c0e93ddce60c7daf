"""What is installed, so exactly that another build can be told apart: wheels by their files, checkouts by commit."""

import base64
import csv
import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

_SOURCES = (".py", ".so")
_GIT_PATIENCE = 60


class Installed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A distribution as it is on a machine; all is empty of what is installed as none.

    Attributes:
        build: tags of its wheel, for which interpreter and platform it was built.
        files: SHA-256 of what its wheel's RECORD says of the package's files; where there is no wheel, of the files.
        altered: files of the package that are not what the RECORD says: of another size or, a module, of other bytes.
        commit: the commit of the checkout that an editable installation leads to.
        clean: whether nothing in that checkout differs from its commit; None where there is none.
    """

    build: str = ""
    files: str = ""
    altered: tuple[str, ...] = ()
    commit: str = ""
    clean: bool | None = None


def installed(name: str) -> Installed | None:
    """What is installed of a distribution; None if there is none of this name."""
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):  # or no name at all
        return None
    folder = _editable(found)
    return _checkout(folder) if folder else _wheel(found)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _editable(found: Distribution) -> Path | None:
    """The folder that an editable installation leads to."""
    told = json.loads(found.read_text("direct_url.json") or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(told["url"]).path))


def _checkout(folder: Path) -> Installed:
    commit, clean = commit_of(folder)
    if commit:
        return Installed(commit=commit, clean=clean)
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.suffix in _SOURCES}
    return Installed(files=files_digest({name: path for name, path in found.items() if not _is_apart(Path(name))}))


def commit_of(folder: Path) -> tuple[str, bool | None]:
    """The commit of the checkout that this very folder is, and whether nothing in it was changed since."""
    commit, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    return commit or "", None if status is None else not status


def files_digest(files: Mapping[str, Path]) -> str:
    """SHA-256 of files by their names."""
    told = [f"{name} {file_digest(path)}" for name, path in sorted(files.items()) if path.is_file()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _git(folder: Path, *command: str) -> str | None:
    """What git says of the checkout that this very folder is; None without git, and of any other folder."""
    if not (folder / ".git").exists():
        return None
    try:
        asked = ["git", "-C", str(folder), *command]
        return subprocess.run(asked, capture_output=True, text=True, timeout=_GIT_PATIENCE, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _is_apart(path: Path) -> bool:
    """Whether a file is of an environment that stands in a checkout, or of a tool."""
    return any(part.startswith(".") or part == "site-packages" for part in path.parts)


def _wheel(found: Distribution) -> Installed:
    """By the package's own files: installers write scripts, and what they say of themselves, as they like."""
    tags = [line.partition(":")[2].strip() for line in (found.read_text("WHEEL") or "").splitlines() if "Tag:" in line]
    lines = csv.reader((found.read_text("RECORD") or "").splitlines())
    listed = [line for line in lines if len(line) == 3 and line[1] and _is_of_the_package(line[0])]
    content = "\n".join(sorted(f"{path} {told}" for path, told, _ in listed))
    altered = tuple(_altered(found, listed))
    return Installed(" ".join(tags), hashlib.sha256(content.encode()).hexdigest(), altered)


def _is_of_the_package(path: str) -> bool:
    return not path.startswith("..") and ".dist-info/" not in path


def _altered(found: Distribution, listed: list[list[str]]) -> Iterator[str]:
    """By the sizes of files that are there, and the bytes of modules; loaded libraries have digests of their own."""
    for name, told, size in listed:
        path = Path(str(found.locate_file(name)))
        if not path.is_file():
            continue  # nothing can have run it
        same_size = not size.isdigit() or path.stat().st_size == int(size)
        if not same_size or (path.suffix == ".py" and _record_hash(path, told.partition("=")[0]) != told):
            yield name


def _record_hash(path: Path, algorithm: str) -> str:
    """As RECORD has it: the digest in URL-safe base64 without padding."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
