"""Expectations applied to records, and what is wrong with the expectations themselves."""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mla_conformance.expectations.entry import Expectation, read_expectations
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status


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
        covering = [entry for entry in self._valid if entry.covers(record, known)]
        if record.status is Status.PASS and covering:
            return _unexpected(record, covering[0])
        foreseen = next((entry for entry in covering if entry.foresees(record)), None)
        if foreseen is None or not record.failed:
            return record
        return record.with_fields(status=Status.EXPECTED_FAILURE, judged=record.status, expectation=foreseen.sentence)

    @property
    def _valid(self) -> Iterator[Expectation]:
        today = self.today or datetime.date.today()
        return (entry for entry in self.entries if not entry.is_expired(today))

    def problems(self) -> Iterator[tuple[Expectation, str]]:
        """Entries that are out of date, each with why."""
        today = self.today or datetime.date.today()
        for entry in self.entries:
            if entry.is_expired(today):
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


def _unexpected(record: Record, entry: Expectation) -> Record:
    message = f"passes, but {entry.source} expects {entry.status}: {entry.reason}"
    return record.with_fields(
        status=Status.UNEXPECTED_PASS,
        message=message,
        judged=record.status,
        expectation=entry.sentence,
    )
