"""One expectation and the TOML files that hold them."""

import datetime
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from mla_conformance.cases.case import Case
from mla_conformance.expectations.grammar import CaseQuery, Condition
from mla_conformance.files.inputs import InputError, convert, read_text
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.version import SUITE_VERSION

_NOT_EXPECTABLE = {
    Status.PASS,
    Status.UNSUPPORTED,
    Status.UNAVAILABLE,
    Status.HARNESS_ERROR,
    Status.EXPECTED_FAILURE,
    Status.UNEXPECTED_PASS,
}
_SUITE = re.compile(r"\d{4}(\.\d{1,9}){1,4}")
_MOST_BYTES, _LONGEST_LINE = 2**20, 2048


class Category(StrEnum):
    """What would have to change for the failure to go away."""

    BUG = "bug"
    DESIGN = "design"
    HARDWARE = "hardware"
    ENVIRONMENT = "environment"


_CHOICES: dict[str, list[str]] = {
    "status": [status for status in Status if status not in _NOT_EXPECTABLE],
    "check": ["", *Check],
    "category": list(Category),
}


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A failure that is known.

    Attributes:
        backend: name in reports, or ``*``.
        case: query of the cases that fail, or several of them.
        status: how they fail.
        check: what they fail on, or empty for anything.
        reason: why, for a person.
        link: an issue or a page, or empty.
        category: what would have to change.
        when: condition on device and versions, or empty.
        until: ISO date after which, or suite version from which, the entry has expired; or empty.
        file: where the entry stands.
        number: which entry of the file, from 1.
    """

    backend: str
    case: str | tuple[str, ...]
    status: str = Status.FAIL
    check: str = ""
    reason: str = ""
    link: str = ""
    category: str = Category.BUG
    when: str = ""
    until: str = ""
    file: str = ""
    number: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(filter(None, allowed))
                raise ValueError(f"{name}: expected one of {expected}, got {getattr(self, name)!r}")
        for name, parsed in _PARSED.items():
            try:
                getattr(self, parsed)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    @property
    def texts(self) -> tuple[str, ...]:
        """The queries as they are written."""
        return (self.case,) if isinstance(self.case, str) else self.case

    @cached_property
    def queries(self) -> tuple[CaseQuery, ...]:
        """The parsed queries."""
        if not self.case:
            raise ValueError("expected a case query, or a list of some, got none")
        return tuple(map(CaseQuery.parse, self.texts))

    @cached_property
    def condition(self) -> Condition:
        """The parsed condition."""
        return Condition.parse(self.when)

    @cached_property
    def _end(self) -> Version | datetime.date | None:
        if _SUITE.fullmatch(self.until):
            return Version(self.until)
        return datetime.date.fromisoformat(self.until) if self.until else None

    @property
    def source(self) -> str:
        """File and entry, for messages."""
        first, *others = self.texts
        more = f" and {len(others)} more" if others else ""
        return f"{Path(self.file).name} entry {self.number} ({first}{more})"

    @property
    def sentence(self) -> str:
        """Where it stands and what it says."""
        link = f" ({self.link})" if self.link else ""
        return f"{self.source}: {self.category}: {self.reason}{link}"

    def covers(self, record: Record, facts: Mapping[str, str]) -> bool:
        """Whether this entry speaks of the record's backend and case, here."""
        named = self.backend in ("*", record.backend)
        if not named or not self.condition.holds(facts):
            return False
        case = Case.parse(record.case)
        return any(query.matches(case) for query in self.queries)

    def foresees(self, record: Record) -> bool:
        """Whether the record failed as this entry says."""
        return record.status == self.status and self.check in ("", record.check)

    def is_expired(self, today: datetime.date) -> bool:
        """Whether its time is over."""
        if isinstance(self._end, Version):
            return Version(SUITE_VERSION) >= self._end
        return self._end is not None and today > self._end


_PARSED = {"case": "queries", "when": "condition", "until": "_end"}
"""Fields in grammars of their own, and what they are parsed as."""
FIELDS = tuple(field.name for field in fields(Expectation) if field.name not in ("file", "number"))


def read_expectations(path: Path, reasons_required: bool = True) -> tuple[Expectation, ...]:
    """The entries of one file, in order.

    Raises:
        InputError: not TOML, an unknown key or value, or an entry without a reason; names file and entry.
    """
    text = read_text(path)
    _require_small(text, path)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    entries = enumerate(convert(table, _File, str(path)).expectation, start=1)
    return tuple(_entry(entry, path, number, reasons_required) for number, entry in entries)


def _require_small(text: str, path: Path) -> None:
    """Reading TOML takes the square of the length of a key."""
    if len(text) > _MOST_BYTES:
        raise InputError(f"{path}: expected at most {_MOST_BYTES:,} characters, got {len(text):,}")
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > _LONGEST_LINE:
            raise InputError(f"{path}: line {number}: expected at most {_LONGEST_LINE:,} characters, got {len(line):,}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    expectation: list[dict[str, Any]] = []


def _entry(entry: dict[str, Any], path: Path, number: int, reasons_required: bool) -> Expectation:
    where = f"{path}: entry {number}"
    unknown = sorted(set(entry) - set(FIELDS))
    if unknown:
        raise InputError(f"{where}: unknown key {', '.join(unknown)}; known keys: {', '.join(FIELDS)}")
    values = {name: str(value) if isinstance(value, datetime.date) else value for name, value in entry.items()}
    found = convert({**values, "file": str(path), "number": number}, Expectation, where)
    if reasons_required and not found.reason.strip():
        raise InputError(f"{where}: expected a reason, got none")
    return found
