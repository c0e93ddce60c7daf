"""Expectations applied to records, what is wrong with them, and how a report rewrites them.

Rewriting keeps what fails now and nothing else, with the reasons that were written before.
"""

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from mla_conformance.expectations.entry import FIELDS, Expectation, read_expectations
from mla_conformance.files.inputs import InputError
from mla_conformance.files.outputs import write_whole
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.counts import grouped
from mla_conformance.report.summary import RunSummary


def facts(environment: Mapping[str, str], versions: Mapping[str, str]) -> dict[str, str]:
    """What conditions compare with: a report's environment and a backend's libraries."""
    return {**versions, **environment}


def shipped() -> Path:
    """The folder of the expectations that the suite ships."""
    return Path(str(files("mla_conformance.fixtures"))) / "expectations"


@dataclass(frozen=True)
class Expectations:
    """Known failures.

    Attributes:
        entries: in the order in which they are tried.
        today: the date that expiry is compared with; None is the current one.
    """

    entries: tuple[Expectation, ...] = ()
    today: datetime.date | None = None

    @staticmethod
    def load(folders: Iterable[Path]) -> "Expectations":
        """The entries of every ``*.toml`` of these folders.

        Raises:
            InputError: a folder does not exist, or a file of it is malformed.
        """
        return Expectations(tuple(entry for folder in folders for entry in _entries(folder)))

    def apply(self, record: Record, known: Mapping[str, str]) -> Record:
        """The record as these expectations see it.

        Args:
            record: a record; what an earlier expectation made of it is undone.
            known: :func:`facts` of where it was run.
        """
        record = record.as_judged
        valid = (entry for entry in self.entries if not entry.is_expired(self._today))
        covering = [entry for entry in valid if entry.covers(record, known)]
        if record.status is Status.PASS and covering:
            first = covering[0]
            said = f"passes, but {first.source} expects {first.status}: {first.reason}"
            unexpected = record.with_fields(status=Status.UNEXPECTED_PASS, message=said)
            return unexpected.with_fields(judged=record.status, expectation=first.sentence)
        foreseen = next((entry for entry in covering if entry.foresees(record)), None)
        if foreseen is None or not record.failed:
            return record
        return record.with_fields(status=Status.EXPECTED_FAILURE, judged=record.status, expectation=foreseen.sentence)

    @property
    def _today(self) -> datetime.date:
        return self.today or datetime.date.today()

    def problems(self) -> Iterator[tuple[Expectation, str]]:
        """Entries that are out of date, each with why."""
        for entry in self.entries:
            if entry.is_expired(self._today):
                yield entry, f"expired: until {entry.until}"
                continue
            for query in entry.queries:
                if query.is_stale:
                    yield entry, f"stale: no case of the suite matches {query.text}"


def _entries(folder: Path) -> Iterator[Expectation]:
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with expectations, *.toml")
    for path in sorted(folder.glob("*.toml")):
        yield from read_expectations(path)


_DEFAULTS = Expectation(backend="*", case="*")


@dataclass(frozen=True)
class Update:
    """What an update does to a folder.

    Attributes:
        kept: entries that still hold, or that the report says nothing about.
        added: new entries, without a reason yet.
        removed: entries, or some of an entry's cases, that no longer fail as they say.
    """

    kept: tuple[Expectation, ...]
    added: tuple[Expectation, ...]
    removed: tuple[Expectation, ...]

    def write(self, folder: Path) -> None:
        """Rewrite the files that change.

        Raises:
            InputError: a file cannot be written; the ones before it are.
        """
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
    """What a report makes of the expectations in ``folder``.

    Raises:
        InputError: a file of the folder is malformed.
    """
    paths = sorted(folder.glob("*.toml")) if folder.is_dir() else []
    existing = [entry for path in paths for entry in read_expectations(path, reasons_required=False)]
    run = [
        (record.as_judged, facts(report.environment, b.facts.versions)) for b in report.backends for record in b.records
    ]
    parts = [part for entry in existing for part in _split(entry, run)]
    kept = [part for part, holds in parts if holds]
    failing = [(each, known) for each, known in run if each.failed and each.status is not Status.HARNESS_ERROR]
    new = [record for record, known in failing if not any(e.covers(record, known) and e.foresees(record) for e in kept)]
    ways = grouped(new, lambda record: (record.backend, record.status, record.check)).values()
    added = tuple(_entry_for(way, folder) for way in ways)
    return Update(tuple(kept), added, tuple(part for part, holds in parts if not holds))


def _split(entry: Expectation, run: Sequence[tuple[Record, Mapping[str, str]]]) -> list[tuple[Expectation, bool]]:
    """The entry with the queries that hold, and with those that do not."""
    single = {text: _holds(replace(entry, case=text), run) for text in entry.texts}
    parts = ((tuple(text for text in single if single[text] is holds), holds) for holds in (True, False))
    return [(replace(entry, case=_shortest(texts)), holds) for texts, holds in parts if texts]


def _shortest(texts: tuple[str, ...]) -> str | tuple[str, ...]:
    return texts[0] if len(texts) == 1 else texts


def _holds(entry: Expectation, run: Sequence[tuple[Record, Mapping[str, str]]]) -> bool:
    """Whether something that it covers fails as it says, or nothing that it covers was run."""
    covered = [record for record, known in run if entry.covers(record, known)]
    return not covered or any(entry.foresees(record) for record in covered)


def _entry_for(records: Sequence[Record], folder: Path) -> Expectation:
    """An entry for what a backend fails in one way: one reason, unless a person splits it."""
    first, cases = records[0], _shortest(tuple(record.case for record in records))
    file = folder / f"{first.backend.replace('[', '-').rstrip(']')}.toml"
    return Expectation(backend=first.backend, case=cases, status=first.status.value, check=first.check, file=str(file))


def to_toml(entry: Expectation) -> str:
    """The entry as TOML, without what is as by default; the reason always stands, for a person to fill."""
    always = ("backend", "case", "status", "reason", "category")
    written = [n for n in FIELDS if n in always or getattr(entry, n) != getattr(_DEFAULTS, n)]
    lines = [f"{name} = {_value(getattr(entry, name))}" for name in written]
    return "\n".join(["[[expectation]]", *lines]) + "\n"


def _value(value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "\n".join(["[", *(f"    {_string(text)}," for text in value), "]"])
    return _string(value)


def _string(text: str) -> str:
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
