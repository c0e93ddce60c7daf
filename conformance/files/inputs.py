"""Files that a person or another program wrote: read whole, or refused with the file's name."""

import json
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """A file or argument that cannot be used as it stands; the message names it and says what was expected."""


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        InputError: it cannot be read, is cut off or malformed, or holds something else than an object.
    """
    try:
        data = json.loads(read_text(path))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not JSON (cut off?): {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def member(data: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """The entry ``name`` of an object, of the wanted type.

    Raises:
        InputError: it is missing or of another type.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected an object, got {type(data).__name__}")
    if name not in data:
        raise InputError(f"{where}: expected an entry '{name}'")
    if not isinstance(data[name], kind) or (isinstance(data[name], bool) and kind is int):
        raise InputError(f"{where}: entry '{name}' is of type {type(data[name]).__name__}")
    return data[name]
