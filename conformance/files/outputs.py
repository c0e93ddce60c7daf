"""Files are written whole or not at all, and of hand-written texts the sections that are a command's."""

import os
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.inputs import InputError, read_text


def write_whole(path: Path, text: str) -> None:
    """Write a text file, with escapes for what UTF-8 cannot hold; a full disk leaves an earlier one as it was."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several processes may write one file
    try:
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def require_writable(path: Path) -> None:
    """Refuse a place that can receive no file, before the work whose outcome it is to receive."""
    try:
        _require_file(path)
        there = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"{path}: cannot be written: expected a folder that takes files, got {there}")


def _require_file(path: Path) -> None:
    """A file is replaced as a whole, which a folder cannot be, and a device must not be."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a FIFO, a device or a socket"
        raise InputError(f"{path}: expected a file, this is {what}")


def write_output(path: Path, text: str) -> None:
    try:
        _require_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


@dataclass(frozen=True)
class Section:
    path: Path  # the file
    name: str  # of the section
    content: str  # what stands between the markers

    @staticmethod
    def of(path: Path, name: str) -> "Section":
        _, content, _ = _parts(path, name)
        return Section(path, name, content)

    def write(self, content: str) -> None:
        """Put this in the section's place and leave the rest of the file as it was."""
        before, _, after = _parts(self.path, self.name)  # another section of it may have been written meanwhile
        write_output(self.path, f"{before}\n{content}\n{after}")


def _parts(path: Path, name: str) -> tuple[str, str, str]:
    """A file up to a section's first marker, what stands between both, and the rest."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, first, rest = read_text(path).partition(begin)
    content, second, after = rest.partition(end)
    if not first or not second or any(marker in before + content + after for marker in (begin, end)):
        raise InputError(f"{path}: expected {begin} and {end}, once each and in this order")
    return before + begin, content, end + after
