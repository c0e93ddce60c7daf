"""Files that a person or another program wrote: read whole, or refused with the file's name."""

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


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


def decode(text: str, kind: type[_T], source: str) -> _T:
    """The value of a JSON text.

    Args:
        text: of a file, from whoever wrote it.
        kind: type of the value, strictly.
        source: the file's name.

    Raises:
        InputError: it is cut off, malformed, or of another type; names the file and the place in it.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{source}: {_sentence(error)}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError(f"{source}: not JSON (cut off?): {error}") from error


def convert(data: Any, kind: type[_T], source: str) -> _T:
    """A value of a wanted type from plain data, strictly.

    Raises:
        InputError: it is of another type; names ``source`` and the place in it.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{source}: {_sentence(error)}") from error


def _sentence(error: msgspec.ValidationError) -> str:
    """Place first, then what was expected and what came."""
    said, _, place = re.fullmatch(r"(.*?)( - at `(.*)`)?", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
    said = said.replace("Invalid enum value", "expected one of the values of this field, got")
    place = (place or "").removeprefix("$").removeprefix(".")
    return f"{place}: {said[:1].lower()}{said[1:]}" if place else f"{said[:1].lower()}{said[1:]}"
