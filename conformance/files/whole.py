"""Files, read whole or refused with their names, and written whole or not at all."""

import errno
import json
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

_T = TypeVar("_T")
_UNSEEN = "\u115f\u1160\u3164\uffa0"  # the letters that are drawn as nothing: fillers of Hangul
MOST_MEBIBYTES = 128  # size of a file that is read; the report of one backend on the full tier has 0.6


class InputError(ValueError):
    """A file or argument that cannot be used as it stands; the message names it and says what was expected."""


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text: {error}") from error


def read_bytes(path: Path) -> bytes:
    most = MOST_MEBIBYTES * 2**20
    try:
        with open_regular(path) as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise InputError(f"{path}: expected at most {MOST_MEBIBYTES} MiB, got more")
    return content


def open_regular(path: Path) -> BinaryIO:
    """A file, opened to be read; nobody may ever write into a FIFO, and a device has no end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "expected a regular file, got a FIFO, a device or a socket", str(path))
    return file


def has_letters(text: str) -> bool:
    """Whether a text that a person has to write says something: a letter of some script that can be seen."""
    return any(character.isalpha() and character not in _UNSEEN for character in text)


def decode(text: str, kind: type[_T], source: str) -> _T:
    def require_distinct(pairs: list[tuple[str, Any]]) -> None:  # which of the values counts would be our choice
        for name, times in Counter(name for name, _ in pairs).items():
            if times > 1:
                raise InputError(f"{source}: expected every name once in an object, got {name!r} twice")

    try:
        value = msgspec.json.decode(text, type=kind)
        json.loads(text, object_pairs_hook=require_distinct)
    except msgspec.ValidationError as error:
        raise InputError(f"{source}: {_sentence(error)}") from error
    except RecursionError as error:
        raise InputError(f"{source}: expected JSON of a few levels, got it nested too deeply") from error
    except InputError:
        raise
    except ValueError as error:  # malformed, no Unicode, or a number of thousands of digits
        raise InputError(f"{source}: not JSON (cut off?): {error}") from error
    return value


def convert(data: Any, kind: type[_T], source: str) -> _T:
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


def write_section(path: Path, name: str, content: str) -> None:
    before, _, after = section_of(path, name)
    write_output(path, f"{before}\n{content}\n{after}")


def section_of(path: Path, name: str) -> tuple[str, str, str]:
    """What stands between the markers of a section, with what stands before and behind it."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, first, rest = read_text(path).partition(begin)
    content, second, after = rest.partition(end)
    if not first or not second or any(marker in before + content + after for marker in (begin, end)):
        raise InputError(f"{path}: expected {begin} and {end}, once each and in this order")
    return before + begin, content, end + after
