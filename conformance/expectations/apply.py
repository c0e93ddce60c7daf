"""Expectations: one of them and the files that hold them, what they make of records, and how a report rewrites them."""

import datetime
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from mla_conformance.backends.references import known_backends, known_variants
from mla_conformance.cases.case import Case
from mla_conformance.expectations.grammar import CaseQuery, Condition
from mla_conformance.files.whole import InputError, convert, has_letters, read_text, write_whole
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.report.causes import grouped
from mla_conformance.report.summary import RunSummary
from mla_conformance.version import SUITE_VERSION

_SUITE = re.compile(r"[0-9]{4}(\.[0-9]{1,9}){1,4}")
KNOWN_FAILURES = Path(str(files("mla_conformance.fixtures"))) / "expectations"
_MOST_BYTES, _LONGEST_LINE = 2**20, 2048  # reading TOML takes the square of the length of a key
_CHOICES: dict[str, list[str]] = {"status": [Status.FAIL, Status.CRASH, Status.TIMEOUT], "check": ["", *Check]}
_CHOICES["category"] = ["bug", "design", "hardware", "environment"]


@dataclass(kw_only=True)
class Expectation:
    backend: str  # name in reports, or ``*``
    case: str | tuple[str, ...]  # query of the cases that fail, or several of them
    status: str = Status.FAIL  # how they fail
    check: str = ""  # what they fail on, or empty for anything
    reason: str = ""  # why, for a person
    link: str = ""  # an issue or a page, or empty
    category: str = "bug"  # what would have to change for the failure to go away
    when: str = ""  # condition on device and versions, or empty
    until: str = ""  # ISO date after which, or suite version from which, the entry has expired; or empty
    sometimes: bool = False  # whether a pass is foreseen as well, as of a race that is not always lost
    file: str = ""  # where the entry stands
    number: int = 0  # which entry of the file, from 1

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(filter(None, allowed))
                raise ValueError(f"{name}: expected one of {expected}, got {getattr(self, name)!r}")
        self.texts = (self.case,) if isinstance(self.case, str) else self.case
        where = "case"
        try:
            if not self.case:
                raise ValueError("expected a case query, or a list of some, got none")
            self.queries = tuple(map(CaseQuery.parse, self.texts))
            where = "when"
            self.condition = Condition.parse(self.when)
            where = "until"
            self.end: Version | datetime.date | None = None
            if self.until:
                is_suite = _SUITE.fullmatch(self.until)
                self.end = Version(self.until) if is_suite else datetime.date.fromisoformat(self.until)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @property
    def source(self) -> str:
        first, *others = self.texts
        more = f" and {len(others)} more" if others else ""
        return f"{Path(self.file).name} entry {self.number} ({first}{more})"

    @property
    def sentence(self) -> str:
        link = f" ({self.link})" if self.link else ""
        return f"{self.source}: {self.category}: {self.reason}{link}"

    def covers(self, record: Record, facts: Mapping[str, str]) -> bool:
        """Whether this entry speaks of the record's backend and case, here; a file's class is no registered backend.

        A name without a [variant] stands for the one that served its calls.
        """
        another = record.reference != record.backend and record.backend in _registered()
        served = f"{record.backend}[{record.evidence.get('variant', '')}]"
        named = self.backend == "*" or (self.backend in (record.backend, served) and not another)
        if not named or not self.condition.holds(facts):
            return False
        case = Case.parse(record.case)
        return any(query.matches(case) for query in self.queries)

    def foresees(self, record: Record) -> bool:
        return record.status == self.status and self.check in ("", record.check)

    def is_expired(self, today: datetime.date) -> bool:
        if isinstance(self.end, Version):
            return Version(SUITE_VERSION) >= self.end
        return self.end is not None and today > self.end


@cache
def _registered() -> frozenset[str]:
    return frozenset(backend.name for backend in (*known_backends(), *known_variants()))


FIELDS = tuple(field.name for field in fields(Expectation) if field.name not in ("file", "number"))


def read_expectations(path: Path, reasons_required: bool = True) -> tuple[Expectation, ...]:
    text = read_text(path)
    if len(text) > _MOST_BYTES:
        raise InputError(f"{path}: expected at most {_MOST_BYTES:,} characters, got {len(text):,}")
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > _LONGEST_LINE:
            raise InputError(f"{path}: line {number}: expected at most {_LONGEST_LINE:,} characters, got {len(line):,}")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    found = []
    for number, entry in enumerate(convert(table, _File, str(path)).expectation, start=1):
        where = f"{path}: entry {number}"
        if unknown := sorted(set(entry) - set(FIELDS)):
            raise InputError(f"{where}: unknown key {', '.join(unknown)}; known keys: {', '.join(FIELDS)}")
        values = {name: str(value) if isinstance(value, datetime.date) else value for name, value in entry.items()}
        read = convert({**values, "file": str(path), "number": number}, Expectation, where)
        if reasons_required and not has_letters(read.reason):
            raise InputError(f"{where}: expected a reason in words, got {read.reason!r}")
        found.append(read)
    return tuple(found)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    expectation: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Expectations:
    entries: tuple[Expectation, ...] = ()  # in the order in which they are tried
    today: datetime.date | None = None  # the date that expiry is compared with; None is the current one

    @staticmethod
    def load(folders: Iterable[Path]) -> "Expectations":
        found: list[Expectation] = []
        for folder in folders:
            if not folder.is_dir():
                raise InputError(f"{folder}: expected a folder with expectations, *.toml")
            found += [entry for path in sorted(folder.glob("*.toml")) for entry in read_expectations(path)]
        return Expectations(tuple(found))

    def apply(self, record: Record, known: Mapping[str, str]) -> Record:
        """The record by these expectations and no others; conditions compare with what is ``known``."""
        record, today = record.as_judged, self.today or datetime.date.today()
        covering = [each for each in self.entries if each.covers(record, known) and not each.is_expired(today)]
        if record.status is Status.PASS and covering and not any(entry.sometimes for entry in covering):
            first = covering[0]
            said = f"passes, but {first.source} expects {first.status}: {first.reason}"
            unexpected = record.with_fields(status=Status.UNEXPECTED_PASS, message=said)
            return unexpected.with_fields(judged=record.status, expectation=first.sentence)
        foreseen = next((entry for entry in covering if entry.foresees(record)), None)
        if foreseen is None or not record.failed:
            return record
        return record.with_fields(status=Status.EXPECTED_FAILURE, judged=record.status, expectation=foreseen.sentence)

    def problems(self) -> Iterator[tuple[Expectation, str]]:
        for entry in self.entries:
            if entry.is_expired(self.today or datetime.date.today()):
                yield entry, f"expired: until {entry.until}"
                continue
            for query in entry.queries:
                if query.is_stale:
                    yield entry, f"stale: no case of the suite matches {query.text}"


@dataclass(frozen=True)
class Update:
    kept: tuple[Expectation, ...]  # entries that still hold, or that the report says nothing about
    added: tuple[Expectation, ...]  # new entries, without a reason yet
    removed: tuple[Expectation, ...]  # entries, or some of an entry's cases, that no longer fail as they say

    def write(self, folder: Path) -> None:
        texts = grouped((*self.kept, *self.added), lambda entry: entry.file)
        changed = {entry.file for entry in (*self.added, *self.removed)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(changed):
                if name in texts:
                    write_whole(Path(name), "\n".join(map(to_toml, texts[name])))
                else:
                    Path(name).unlink()
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror}") from error


def plan_update(report: RunSummary, folder: Path) -> Update:
    paths = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    existing = [entry for path in paths for entry in read_expectations(path, reasons_required=False)]
    known_of = {backend.name: {**backend.facts.versions, **report.environment} for backend in report.backends}
    run = [(record.as_judged, known_of[record.backend]) for record in report.records]
    kept, removed = list[Expectation](), list[Expectation]()
    for entry in existing:
        holding = {}  # whether something that it covers fails as it says, or might have, or nothing of it was run
        for text in entry.texts:
            one = replace(entry, case=text)
            covered = [record for record, known in run if one.covers(record, known)]
            holding[text] = not covered or one.sometimes or any(map(one.foresees, covered))
        for into, holds in ((kept, True), (removed, False)):
            if texts := tuple(text for text in holding if holding[text] is holds):
                into.append(replace(entry, case=texts if texts[1:] else texts[0]))
    failing = [(each, known) for each, known in run if each.failed and each.status is not Status.HARNESS_ERROR]
    new = [record for record, known in failing if not any(e.covers(record, known) and e.foresees(record) for e in kept)]
    ways = grouped(new, lambda record: (record.backend, record.status, record.check)).values()
    added = []
    for first, *others in ways:  # one reason for what a backend fails in one way, unless a person splits it
        cases = (first.case, *(each.case for each in others)) if others else first.case
        name, status = str(folder / f"{first.backend.replace('[', '-').rstrip(']')}.toml"), first.status.value
        added.append(Expectation(backend=first.backend, case=cases, status=status, check=first.check, file=name))
    return Update(tuple(kept), tuple(added), tuple(removed))


def to_toml(entry: Expectation) -> str:
    """The entry as TOML, without what is as by default; the reason always stands, for a person to fill."""
    always = ("backend", "case", "status", "reason", "category")
    lines = ["[[expectation]]"]
    for name in FIELDS:
        value = getattr(entry, name)
        if name in always or value != getattr(Expectation, name):
            texts = value if isinstance(value, tuple) else (value,)
            told = [json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts]
            listed = [f"{name} = [", *(f"    {text}," for text in told), "]"]
            lines += listed if isinstance(value, tuple) else [f"{name} = {told[0]}"]
    return "\n".join(lines) + "\n"
