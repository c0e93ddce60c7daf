"""Expectations: known failures with reasons, outside the tests, that expire and must not turn out wrong.

Imports from: files, cases, judging, vocabulary.
"""

import contextlib
import datetime
import json
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from mla_conformance.backends.references import known_backends, known_variants
from mla_conformance.cases.case import Case, CaseError, parse_fields
from mla_conformance.files.whole import InputError, convert, has_letters, read_text
from mla_conformance.judging.record import Check, Record, Status
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary import arrays, capabilities

_SUITE = re.compile(r"[0-9]{4}(\.[0-9]{1,9}){1,4}")
KNOWN_FAILURES = Path(str(files("mla_conformance.fixtures"))) / "expectations"
_MOST_BYTES, _LONGEST_LINE = 2**20, 2048  # reading TOML takes the square of the length of a key
_CHOICES: dict[str, list[str]] = {"status": [Status.FAIL, Status.CRASH, Status.TIMEOUT], "check": ["", *Check]}
_CHOICES["category"] = ["bug", "design", "hardware", "environment"]
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_COMPARISON = re.compile(r"""(not\s+)?([A-Za-z][\w.-]*)\s*(<=|>=|==|!=|<|>)\s*("[^"]*"|'[^']*'|[^\s"'<>=!]+)""")
_LIMIT = re.compile(r"\s*(?P<name>\w+)\s*(?P<sign>[<>~])\s*(?P<value>\S+)\s*")
Comparison = tuple[str, str, str, bool]  # name, operator, value, whether it is negated


def parse_condition(text: str) -> tuple[tuple[Comparison, ...], ...]:
    """Alternatives, each of which holds if all of its comparisons hold; of no text, one that always does.

    ``compute_capability >= 9.0 and not flash-attn < 2.8`` is ``or`` over ``and`` over comparisons with a library of the
    backend or what a report's environment holds; one with something that is not there does not hold.
    """
    alternatives = list[tuple[Comparison, ...]]()
    for part in " ".join(text.split()).split(" or ") if text.strip() else ():
        comparisons = []
        for said in map(str.strip, part.split(" and ")):
            found = _COMPARISON.fullmatch(said)
            if not found:
                raise ValueError(f"expected NAME OPERATOR VALUE such as torch < 2.12, got {said!r}")
            negation, name, sign, value = found[1], found[2], found[3], found[4].strip("\"'")
            if sign not in ("==", "!=") and _version(value) is None:
                raise ValueError(f"{sign} expects a version after it, got {value!r}")
            comparisons.append((name, sign, value, bool(negation)))
        alternatives.append(tuple(comparisons))
    return tuple(alternatives) or ((),)


def holds(condition: Iterable[Iterable[Comparison]], facts: Mapping[str, str]) -> bool:
    def compares(name: str, sign: str, value: str) -> bool:
        actual = facts.get(name, "")
        versions = _version(actual), _version(value)
        if None not in versions:
            return _OPERATORS[sign](*versions)
        return bool(actual) and sign in ("==", "!=") and _OPERATORS[sign](actual, value)

    return any(all(compares(*said) != negated for *said, negated in part) for part in condition)


def _version(text: str) -> Version | None:
    try:
        return Version(Version(text).public)  # 2.13.0+cpu is 2.13.0
    except ValueError:  # none, or one of thousands of digits
        return None


@dataclass(frozen=True)
class CaseQuery:
    """Cases of a capability with certain fields: ``context_chunk:dtype=fp16``, ``select*:topk>8192``, ``*:data~nan``.

    The capability may end in ``*``, which stands for any end. Of several lengths ``<`` and ``>`` compare the largest;
    ``~`` asks for a data regime of any request. The id of a listed or fitted case names that case alone.
    """

    text: str
    capability: str
    fields: tuple[tuple[str, str, Any], ...]  # name, operator, value

    @staticmethod
    @cache
    def parse(text: str) -> "CaseQuery":
        capability, _, rest = text.strip().partition(":")
        if not capability:
            raise CaseError(f"malformed case query {text!r}: expected 'capability:field=value;…', or '*'")
        fields, equal = [], []
        for part in rest.split(";") if rest else ():
            if found := _LIMIT.fullmatch(part):
                fields.append((found["name"], found["sign"], _limit(**found.groupdict())))
            else:
                equal.append(part)
        fields += [(name, "=", value) for name, value in parse_fields(";".join(equal)).items()]
        return CaseQuery(text.strip(), capability, tuple(fields))

    @cached_property
    def _is_fitted(self) -> bool:
        """Whether this is the whole id of a case of a role's space, which a kernel may have beside the list."""
        try:
            return self.capability in arrays.SPACES and Case.parse(self.text).id == self.text
        except CaseError:
            return False

    def matches(self, case: Case) -> bool:
        """Whether the query names this case; a field that its role does not have matches no value."""
        if self._is_fitted or self.text in _listed(self.capability):
            return case.id == self.text
        return _covers(self.capability, case.capability) and all(_holds(case, *field) for field in self.fields)

    @property
    def is_stale(self) -> bool:
        """Whether no case of the suite's list matches, and no fitted one can."""
        return not self._is_fitted and not any(map(self.matches, _listed(self.capability).values()))


def _limit(name: str, sign: str, value: str) -> int | str:
    """What follows < or >, which is a number, or ~, which is a data regime."""
    if sign == "~":
        regime: str = parse_fields(f"{name}={value}")[name]
        if name == "data":
            return regime
    elif value.isdecimal():
        for text in (f"{name}=[{value}]", f"{name}={value}"):  # of several lengths, or one number
            with contextlib.suppress(CaseError):
                if isinstance(parse_fields(text)[name], int | tuple):
                    return int(value)
    expected = "a field of numbers and a number, as in topk>8192, or data~ and a data regime"
    raise CaseError(f"malformed case query {name}{sign}{value}: expected {expected}")


def _holds(case: Case, name: str, sign: str, value: Any) -> bool:
    has = getattr(case, name, None)
    if sign == "=":
        return bool(has == value)
    if sign == "~":
        return value in case.regimes
    largest = max(has, default=0) if isinstance(has, tuple) else has
    return largest is not None and bool(_OPERATORS[sign](largest, value))


def _covers(pattern: str, capability: str) -> bool:
    return capability.startswith(pattern[:-1]) if pattern.endswith("*") else capability == pattern


@cache
def _listed(pattern: str) -> dict[str, Case]:
    """The listed cases of the capabilities that a query covers, by id; a gate asks for them a thousand times."""
    found = (entry for name, entry in capabilities.CAPABILITIES.items() if _covers(pattern, name))
    return {case.id: case for entry in found for case in entry.cases}


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
            self.condition = parse_condition(self.when)
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
        return f"{self.source}: {self.category}: {self.reason}" + (f" ({self.link})" if self.link else "")

    def covers(self, record: Record, facts: Mapping[str, str]) -> bool:
        """Whether this entry speaks of the record's backend and case, here; a file's class is no registered backend.

        A name without a [variant] stands for the one that served its calls.
        """
        another = record.reference != record.backend and record.backend in _registered()
        served = f"{record.backend}[{record.evidence.get('variant', '')}]"
        named = self.backend == "*" or (self.backend in (record.backend, served) and not another)
        if not named or not holds(self.condition, facts):
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
