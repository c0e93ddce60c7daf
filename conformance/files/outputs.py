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
