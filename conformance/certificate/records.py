"""The records of a suite as one file: first the ids of its cases, then a line for each kernel, version and device.

A line has statuses by runs, ids by what they share, and every text that comes twice once.
"""

import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mla_conformance.certificate.certificate import RECORDS, SANITIZED, Certificate, SanitizedKernel
from mla_conformance.certificate.certificate import SCHEMA as RECORD_SCHEMA
from mla_conformance.certificate.verify import listed_ids
from mla_conformance.files.whole import InputError, convert, decode, read_text, require_writable, write_output
from mla_conformance.judging.record import Status
from mla_conformance.traits.sanitizer import TOOLS
from mla_conformance.version import SUITE_VERSION

SCHEMA = "mla-conformance-records/1"
_LETTERS: dict[Status | None, str] = dict(zip((*Status, None), "pfunchtwx-", strict=True))
"""By status; the last is that of a case which the record says nothing of."""
_STATUSES = {letter: status for status, letter in _LETTERS.items()}
_SHORT = 12  # a text of as many characters is written out wherever it stands
_MOST_CHARACTERS = 2**24  # of a line's texts together, and of its ids: a fortieth of it is usual


@dataclass(frozen=True)
class KeptRecord:
    certificate: Certificate
    sanitized: tuple[SanitizedKernel, ...] = ()  # what tools of compute-sanitizer reported of its kernel
    signature: str = ""  # of its seal; empty if it is not signed


class _Line(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    # All but the cases: ``@N`` is text N, ``#N`` case N; a text that begins with either has another @ in front
    record: dict[str, Any]
    listed: int  # so many of the file's ids were known when it was written; the record's cases are these, then its own
    statuses: str  # of the cases, a letter and how often it comes
    fitted: tuple[str, ...] = ()  # ids of the record's own cases, folded
    texts: tuple[str, ...] = ()  # what is said more than once
    sanitized: tuple[dict[str, Any], ...] = ()  # as the record
    signature: str = ""  # of the seal


def pack(kept: KeptRecord, ids: Sequence[str]) -> str:
    cases = kept.certificate.cases
    fitted = sorted(cases.keys() - set(ids))
    plain, sanitized = msgspec.json.decode(msgspec.json.encode((kept.certificate, kept.sanitized)))
    del plain["cases"]
    names = {id: f"#{number}" for number, id in enumerate((*ids, *fitted))}
    often = [text for text, times in Counter(_strings((plain, sanitized))).items() if times > 1 and len(text) > _SHORT]
    texts = [text for text in often if text not in names]
    names |= {text: f"@{number}" for number, text in enumerate(texts)}

    def shortened(text: str) -> str:
        return names.get(text, f"@{text}" if text.startswith(("@", "#")) else text)

    runs = groupby(_LETTERS[cases.get(id)] for id in (*ids, *fitted))
    statuses = "".join(f"{letter}{len(list(run))}" for letter, run in runs)
    record, told = _mapped(plain, shortened), _mapped(sanitized, shortened)
    line = _Line(record, len(ids), statuses, tuple(folded(fitted)), tuple(texts), told, kept.signature)
    return msgspec.json.encode(line).decode()


def unpack(text: str, ids: Sequence[str], source: str) -> KeptRecord:
    line, known = decode(text, _Line, source), list[str]()

    def meant(text: str) -> str:
        if text.startswith("#"):
            return known[int(text[1:])]
        if text.startswith("@") and not text.startswith(("@@", "@#")):
            return line.texts[int(text[1:])]
        return text.removeprefix("@")

    try:
        known += [*ids[: line.listed], *unfolded(line.fitted)]
        runs = re.findall(rf"([{''.join(_STATUSES)}])(\d{{1,9}})", line.statuses, re.ASCII)
        if "".join(map("".join, runs)) != line.statuses or sum(int(times) for _, times in runs) != len(known):
            raise ValueError(f"its statuses are not those of {len(known)} cases")
        spread = (_STATUSES[letter] for letter, times in runs for _ in range(int(times)))
        statuses = dict(zip(known, spread, strict=True))
        plain, sanitized = _mapped([line.record, [*line.sanitized]], meant)
        _require_few(sum(map(len, _strings((plain, sanitized)))))  # a text of the line may be named many times
    except (ValueError, IndexError, RecursionError) as error:
        raise InputError(f"{source}: expected a record as `certify --submission` writes it: {error}") from error
    if plain.get("schema") != RECORD_SCHEMA:
        raise InputError(f"{source}: expected a record of schema {RECORD_SCHEMA}, got {plain.get('schema')!r}")
    plain["cases"] = {id: status for id, status in statuses.items() if status is not None}
    tools = convert(sanitized, tuple[SanitizedKernel, ...], source)
    return KeptRecord(convert(plain, Certificate, source), tools, line.signature)


def folded(ids: Iterable[str]) -> Iterator[str]:
    """Each id as the number of characters that it shares with the one before, and the rest."""
    for before, id in pairwise(("", *ids)):
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, id, strict=False))))
        yield f"{shared} {id[shared:]}"


def unfolded(texts: Iterable[str]) -> list[str]:
    """The ids; ValueError if a text is none that was folded, or if they are too long, which takes little to say."""
    found, id, length = list[str](), "", 0
    for text in texts:
        shared, _, rest = text.partition(" ")
        id = id[: int(shared)] + rest
        found.append(id)
        length += len(id)
        _require_few(length)
    return found


def _require_few(characters: int) -> None:
    if characters > _MOST_CHARACTERS:
        raise ValueError(f"its texts have more than {_MOST_CHARACTERS:,} characters")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _strings(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list) else value


def sanitized_problems(certificate: Certificate, sanitized: Sequence[SanitizedKernel]) -> Iterator[str]:
    """What tools reported of another kernel, suite or version than a record's, or in no form that is known."""
    for found in sanitized:
        if found.schema != SANITIZED or found.tool not in TOOLS:
            known = f"{SANITIZED} of one of {', '.join(TOOLS)}"
            yield f"a sanitizer's report: expected {known}, got {found.schema!r} of {found.tool!r}"
        stated = {"backend": found.backend, "suite": found.suite, **found.versions}
        expected = {"backend": certificate.backend, "suite": certificate.suite, **certificate.pins.versions}
        for name in sorted(stated.keys() & expected.keys()):
            if stated[name] != expected[name]:
                yield f"the report of {found.tool} is of {name} {stated[name]}, the record of {expected[name]}"


class _Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: str = SCHEMA
    suite: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class RecordLine:
    source: str  # the file, and the line's number
    text: str  # as it stands there; empty of a file of one record
    kept: KeptRecord | None  # what it holds; None if it is refused
    why: str = ""  # it is refused


def is_records(path: Path) -> bool:
    return path.suffix == ".jsonl"


def read_records(path: Path) -> list[RecordLine]:
    lines = _read(path)[2]
    if not lines:
        raise InputError(f"{path}: expected a line for each record behind the first, got none")
    return lines


def kept_records(path: Path) -> list[KeptRecord]:
    return [line.kept for line in read_records(path) if line.kept]


def _read(path: Path) -> tuple[str, list[str], list[RecordLine]]:
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
        source = f"{path}: line {number}"
        try:
            kept = unpack(text, ids, source)
            if kept.certificate.suite != head.suite:
                got = kept.certificate.suite
                raise InputError(f"{source}: expected a record of suite {head.suite}, got one of {got}")
            if (first_one := seen.setdefault(_key(kept.certificate), number)) != number:
                raise InputError(f"{source}: expected another kernel, version or device than line {first_one}")
            lines.append(RecordLine(source, text, kept))
        except InputError as error:
            lines.append(RecordLine(source, text, None, str(error)))
    return head.suite, ids, lines


def _key(certificate: Certificate) -> tuple[str, ...]:
    versions = sorted(certificate.pins.versions.items())
    return certificate.backend, certificate.device, *(f"{name} {version}" for name, version in versions)


def require_records(path: Path) -> None:
    if not is_records(path):
        raise InputError(f"--submission {path}: expected a file of records, such as {RECORDS}")
    require_writable(path)
    if path.exists() and (suite := _read(path)[0]) != SUITE_VERSION:
        raise InputError(f"--submission {path}: expected records of suite {SUITE_VERSION}, got those of {suite}")


def write_record(path: Path, certificate: Certificate, signature: str = "") -> None:
    """Write a record in place of an earlier one of the kernel in the same versions on the same device."""

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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # kernels may be certified at once
        suite, ids, lines = _read(path) if path.exists() else ("", [], [])
        unchanged = {id(line.kept): line.text for line in lines if line.kept}
        after = sorted(change([line.kept for line in lines if line.kept]), key=lambda each: _key(each.certificate))
        suite = suite or next((each.certificate.suite for each in after), SUITE_VERSION)
        if suite == SUITE_VERSION:
            held = {case for each in after for case in each.certificate.cases}
            ids = list(dict.fromkeys([*ids, *(id for id in listed_ids() if id in held)]))
        head = msgspec.json.encode(_Head(suite=suite, cases=tuple(folded(ids)))).decode()
        texts = [head, *(unchanged.get(id(each)) or pack(each, ids) for each in after)]
        texts += [line.text for line in lines if not line.kept]
        write_output(path, "".join(f"{text}\n" for text in texts))
    finally:
        os.close(folder)
