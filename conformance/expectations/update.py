"""Rewriting expectations from a report: what fails now and nothing else, with the reasons that were written before."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mla_conformance.expectations.apply import facts
from mla_conformance.expectations.entry import FIELDS, Expectation, read_expectations
from mla_conformance.files.inputs import InputError
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.summary import RunSummary

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
        texts = _by_file((*self.kept, *self.added))
        changed = {entry.file for entry in (*self.added, *self.removed)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(changed):
                _rewrite(Path(name), texts.get(name, ()))
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
    failing = [(record, known) for record, known in run if _can_be_expected(record)]
    new = [record for record, known in failing if not any(e.covers(record, known) and e.foresees(record) for e in kept)]
    return Update(tuple(kept), _entries_for(new, folder), tuple(part for part, holds in parts if not holds))


def _can_be_expected(record: Record) -> bool:
    return record.failed and record.status is not Status.HARNESS_ERROR


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


def _entries_for(records: Sequence[Record], folder: Path) -> tuple[Expectation, ...]:
    """An entry for what a backend fails in one way: one reason, unless a person splits it."""
    ways = dict.fromkeys((record.backend, record.status, record.check) for record in records)
    return tuple(_entry_for(way, [r for r in records if (r.backend, r.status, r.check) == way], folder) for way in ways)


def _entry_for(way: tuple[str, Status, str], records: Sequence[Record], folder: Path) -> Expectation:
    backend, status, check = way
    file = folder / f"{backend.replace('[', '-').rstrip(']')}.toml"
    cases = _shortest(tuple(record.case for record in records))
    return Expectation(backend=backend, case=cases, status=status.value, check=check, file=str(file))


def _by_file(entries: Iterable[Expectation]) -> dict[str, list[Expectation]]:
    files: dict[str, list[Expectation]] = {}
    for entry in entries:
        files.setdefault(entry.file, []).append(entry)
    return files


def _rewrite(path: Path, entries: Iterable[Expectation]) -> None:
    text = "\n".join(map(to_toml, entries))
    if not text:
        path.unlink()
        return
    partial = path.with_suffix(".toml.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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
