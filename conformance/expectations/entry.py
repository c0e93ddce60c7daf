"""One expectation and the TOML files that hold them."""

import datetime
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from mla_conformance.cases.case import Case
from mla_conformance.expectations.condition import Condition
from mla_conformance.expectations.query import CaseQuery
from mla_conformance.files.inputs import InputError, read_text
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
_SUITE = re.compile(r"\d{4}\.\d+(\.\d+)*")


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
        case: query of the cases that fail.
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
    case: str
    status: str = Status.FAIL
    check: str = ""
    reason: str = ""
    link: str = ""
    category: str = Category.BUG
    when: str = ""
    until: str = ""
    file: str = ""
    number: int = 0

    @cached_property
    def query(self) -> CaseQuery:
        """The parsed query."""
        return CaseQuery.parse(self.case)

    @cached_property
    def condition(self) -> Condition:
        """The parsed condition."""
        return Condition.parse(self.when)

    @property
    def source(self) -> str:
        """File and entry, for messages."""
        return f"{Path(self.file).name} entry {self.number} ({self.case})"

    @property
    def sentence(self) -> str:
        """Where it stands and what it says."""
        link = f" ({self.link})" if self.link else ""
        return f"{self.source}: {self.category}: {self.reason}{link}"

    def covers(self, record: Record, facts: Mapping[str, str]) -> bool:
        """Whether this entry speaks of the record's backend and case, here."""
        named = self.backend in ("*", record.backend)
        return named and self.query.matches(Case.parse(record.case)) and self.condition.holds(facts)

    def foresees(self, record: Record) -> bool:
        """Whether the record failed as this entry says."""
        return record.status == self.status and self.check in ("", record.check)

    def is_expired(self, today: datetime.date) -> bool:
        """Whether its time is over."""
        if not self.until:
            return False
        if _SUITE.fullmatch(self.until):
            return Version(SUITE_VERSION) >= Version(self.until)
        return today > datetime.date.fromisoformat(self.until)


FIELDS = tuple(field.name for field in fields(Expectation) if field.name not in ("file", "number"))


def read_expectations(path: Path, reasons_required: bool = True) -> tuple[Expectation, ...]:
    """The entries of one file, in order.

    Raises:
        InputError: not TOML, an unknown key or value, or an entry without a reason; names file and entry.
    """
    try:
        table = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    unknown = sorted(set(table) - {"expectation"})
    entries = table.get("expectation", [])
    if unknown or not isinstance(entries, list):
        raise InputError(f"{path}: expected [[expectation]] tables only, got {', '.join(unknown) or 'something else'}")
    return tuple(_entry(entry, path, number, reasons_required) for number, entry in enumerate(entries, start=1))


def _entry(entry: Any, path: Path, number: int, reasons_required: bool) -> Expectation:
    where = f"{path}: entry {number}"
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a table, got {entry!r}")
    values = {name: str(v) if isinstance(v, datetime.date) else v for name, v in entry.items()}
    for problem in _problems(values, reasons_required):
        raise InputError(f"{where}: {problem}")
    return Expectation(**values, file=str(path), number=number)


def _problems(values: dict[str, Any], reasons_required: bool) -> Iterator[str]:
    """What is wrong with an entry, the plainest first."""
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        yield f"unknown key {', '.join(unknown)}; known keys: {', '.join(FIELDS)}"
    yield from (f"expected a key '{name}'" for name in ("backend", "case") if name not in values)
    yield from (f"{name}: expected a string, got {v!r}" for name, v in values.items() if not isinstance(v, str))
    if reasons_required and not values.get("reason", "").strip():
        yield "expected a reason, got none"
    for name, allowed in _CHOICES.items():
        if values.get(name, allowed[0]) not in allowed:
            yield f"{name}: expected one of {', '.join(filter(None, allowed))}, got {values[name]!r}"
    yield from _unparsable(values)


def _unparsable(values: dict[str, str]) -> Iterator[str]:
    parsers = {"case": CaseQuery.parse, "when": Condition.parse, "until": _require_moment}
    for name in parsers.keys() & values.keys():
        try:
            parsers[name](values[name])
        except ValueError as error:
            yield f"{name}: {error}"


def _require_moment(text: str) -> None:
    if text and not _SUITE.fullmatch(text):
        datetime.date.fromisoformat(text)
