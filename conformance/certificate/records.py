"""The records of a suite as one file: first the ids of its cases, then a line for each kernel, version and device."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import Struct

from mla_conformance.certificate.certificate import RECORDS, Certificate
from mla_conformance.certificate.lines import KeptRecord, folded, pack, unfolded, unpack
from mla_conformance.certificate.sanitized import SanitizedKernel, sanitized_problems
from mla_conformance.files.inputs import InputError, decode, read_text
from mla_conformance.files.outputs import require_writable, write_output
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES

SCHEMA = "mla-conformance-records/1"
_SUFFIX = ".jsonl"


class _Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line; further ids are added behind its folded ones."""

    schema: str = SCHEMA
    suite: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class RecordLine:
    """A line behind the first."""

    source: str  # the file and the line's number
    text: str  # as it stands there
    kept: KeptRecord | None  # what it holds; None if it is refused
    why: str = ""  # it is refused, behind the source; empty if it is not


def suite_order(suite: str) -> list[int]:
    """Later suites compare greater."""
    return [int(number) for number in re.findall(r"\d{1,9}", suite)]


def is_records(path: Path) -> bool:
    """Whether a path names a file of many records, by its suffix."""
    return path.suffix == _SUFFIX


def read_records(path: Path) -> list[RecordLine]:
    """The lines of a file."""
    lines = _read(path)[2]
    if not lines:
        raise InputError(f"{path}: expected a line for each record behind the first, got none")
    return lines


def kept_records(path: Path) -> list[KeptRecord]:
    """The records of a file, whatever stands in lines that are refused."""
    return [line.kept for line in read_records(path) if line.kept]


def _read(path: Path) -> tuple[str, list[str], list[RecordLine]]:
    """The suite of a file, the ids of its cases, and its lines."""
    first, *texts = read_text(path).removesuffix("\n").split("\n")
    head = decode(first, _Head, f"{path}: line 1")
    if head.schema != SCHEMA:
        raise InputError(f"{path}: line 1: expected schema {SCHEMA}, got {head.schema!r}")
    try:
        ids = unfolded(head.cases)
    except ValueError as error:
        raise InputError(f"{path}: line 1: expected ids as `certify --submission` folds them: {error}") from error
    lines: list[RecordLine] = []
    seen: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts, start=2):
        line = _line(text, head.suite, ids, f"{path}: line {number}")
        if line.kept and (first_one := seen.setdefault(_key(line.kept.certificate), number)) != number:
            why = f"{line.source}: expected another kernel, version or device than line {first_one}"
            line = replace(line, kept=None, why=why)
        lines.append(line)
    return head.suite, ids, lines


def _line(text: str, suite: str, ids: Sequence[str], source: str) -> RecordLine:
    try:
        kept = unpack(text, ids, source)
        if kept.certificate.suite != suite:
            raise InputError(f"{source}: expected a record of suite {suite}, got one of {kept.certificate.suite}")
    except InputError as error:
        return RecordLine(source, text, None, str(error))
    return RecordLine(source, text, kept)


def _key(certificate: Certificate) -> tuple[str, ...]:
    """What a file holds one record of."""
    versions = sorted(certificate.pins.versions.items())
    return certificate.backend, certificate.device, *(f"{name} {version}" for name, version in versions)


def require_records(path: Path) -> None:
    """Check before a long run that its record can be written into a file."""
    if not is_records(path):
        raise InputError(f"--submission {path}: expected a file of records, such as {RECORDS}")
    require_writable(path)
    if path.exists() and (suite := _read(path)[0]) != SUITE_VERSION:
        raise InputError(f"--submission {path}: expected records of suite {SUITE_VERSION}, got those of {suite}")


def write_record(path: Path, certificate: Certificate, signature: str = "") -> None:
    """Write a record of this suite in place of an earlier one of the kernel in the same versions on the same device."""

    def added(records: list[KeptRecord]) -> list[KeptRecord]:
        others = [each for each in records if _key(each.certificate) != _key(certificate)]
        tools = [tool for each in records if each not in others for tool in each.sanitized]
        return [*others, KeptRecord(certificate, tuple(tools), signature)]

    change_records(path, added)


def write_sanitized(path: Path, found: SanitizedKernel) -> None:
    """Write what a tool reported into the line of its kernel; of several devices into that of its own, if any."""

    def added(records: list[KeptRecord]) -> list[KeptRecord]:
        own = [each for each in records if not any(sanitized_problems(each.certificate, [found]))]
        if not own:
            raise InputError(f"{path}: expected a record of {found.backend} in these versions; certify it first")
        chosen = next((each for each in own if each.certificate.device == found.device), own[0])
        others = (each for each in chosen.sanitized if each.tool != found.tool)
        return [each if each is not chosen else replace(each, sanitized=(*others, found)) for each in records]

    change_records(path, added)


def change_records(path: Path, change: Callable[[list[KeptRecord]], list[KeptRecord]]) -> None:
    """Write a file's records anew; what is not changed keeps its line, and so does what is refused, at the end."""
    with _alone(path):
        suite, ids, lines = _read(path) if path.exists() else (SUITE_VERSION, [], [])
        if suite == SUITE_VERSION:
            ids = list(dict.fromkeys([*ids, *(case.id for entry in CAPABILITIES.values() for case in entry.cases)]))
        unchanged = {id(line.kept): line.text for line in lines if line.kept}
        after = sorted(change([line.kept for line in lines if line.kept]), key=lambda each: _key(each.certificate))
        texts = [
            msgspec.json.encode(_Head(suite=suite, cases=tuple(folded(ids)))).decode(),
            *(unchanged.get(id(each)) or pack(each, ids) for each in after),
            *(line.text for line in lines if not line.kept),
        ]
        write_output(path, "".join(f"{text}\n" for text in texts))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing files of this folder: kernels may be certified at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
