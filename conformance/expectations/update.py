"""Rewriting expectations from a report: what fails now and nothing else, with the reasons that were written before."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        removed: entries whose cases no longer fail as they say.
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
    kept = [entry for entry in existing if _holds(entry, run)]
    failing = [(record, known) for record, known in run if _can_be_expected(record)]
    new = [record for record, known in failing if not any(e.covers(record, known) and e.foresees(record) for e in kept)]
    added = tuple(_entry_for(record, folder) for record in new)
    return Update(tuple(kept), added, tuple(entry for entry in existing if entry not in kept))


def _can_be_expected(record: Record) -> bool:
    return record.failed and record.status is not Status.HARNESS_ERROR


def _holds(entry: Expectation, run: Sequence[tuple[Record, Mapping[str, str]]]) -> bool:
    """Whether something that it covers fails as it says, or nothing that it covers was run."""
    covered = [record for record, known in run if entry.covers(record, known)]
    return not covered or any(entry.foresees(record) for record in covered)


def _entry_for(record: Record, folder: Path) -> Expectation:
    file = folder / f"{record.backend.replace('[', '-').rstrip(']')}.toml"
    return Expectation(
        backend=record.backend, case=record.case, status=record.status.value, check=record.check, file=str(file)
    )


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
    lines = [f"{name} = {_string(getattr(entry, name))}" for name in written]
    return "\n".join(["[[expectation]]", *lines]) + "\n"


def _string(text: str) -> str:
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
