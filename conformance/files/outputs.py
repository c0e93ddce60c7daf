"""Files are written whole or not at all."""

import os
from pathlib import Path

from mla_conformance.files.inputs import InputError


def write_whole(path: Path, text: str) -> None:
    """Write a text file; a full disk leaves an earlier one as it was.

    Raises:
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several processes may write one file
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def require_writable(path: Path) -> None:
    """Refuse a place that can receive no file, before the work whose outcome it is to receive.

    Raises:
        InputError: it is a folder, or in none that files can be written into.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: expected a file, this is a folder")
        there = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(f"{path}: cannot be written: expected a folder that takes files, got {there}")


def write_output(path: Path, text: str) -> None:
    """Write a file that a command was asked for, with its folder.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
