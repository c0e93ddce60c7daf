"""The journal: one JSON line per event, written by the supervisor alone, so that a crash loses nothing."""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.engine.messages import Question, question_of
from mla_conformance.judging.facts import Traced
from mla_conformance.judging.record import Record
from mla_conformance.report.heat_map import HeatMap

JOURNAL_NAME = "journal.jsonl"


class _Event(msgspec.Struct, tag_field="event"):
    pass


class _Plan(_Event, tag="plan"):
    plan: dict[str, Any]


class _Resume(_Event, tag="resume"):
    pass


class _Started(_Event, tag="started"):
    case: str
    backend: str


class _Verdict(_Event, tag="verdict"):
    record: dict[str, Any]


class _Traced(_Event, tag="traced"):
    backend: str
    traced: Traced


class _Heat(_Event, tag="heat"):
    backend: str
    case: str
    heat: HeatMap


class _GaveUp(_Event, tag="gave_up"):
    backend: str
    reason: str


class _End(_Event, tag="end"):
    pass


class JournalError(ValueError):
    """A journal that no run wrote as it stands."""


@dataclass(frozen=True)
class Journal:
    """The event file of a run: its plan, each start and each verdict, what was given up, and its end."""

    path: Path

    @staticmethod
    def inside(directory: Path) -> "Journal":
        """The journal of an output folder."""
        return Journal(directory / JOURNAL_NAME)

    def append(self, event: str, **fields: Any) -> None:
        """Write one event and hand it to the system.

        Raises:
            OSError: the system did not take the whole line.
        """
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = (json.dumps({"event": event, **fields}) + "\n").encode("ascii")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, Any]]:
        """All whole events so far; a last line that was cut off is left out."""
        for line in self._whole().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield _read(line)

    def records(self) -> dict[Question, Record]:
        """The last verdict on each question."""
        return verdicts(self.events())

    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return [event["event"] for event in self.events()][-1:] == ["end"]

    def check(self) -> None:
        """Read every line but one at the end that was cut off.

        Raises:
            JournalError: a line is no event.
        """
        for number, line in enumerate(self._whole().splitlines(), start=1):
            _require_event(line, f"{self.path}, line {number}")

    def repair(self) -> None:
        """Remove a last line that was cut off, so that the next event starts a line of its own."""
        os.truncate(self.path, len(self._whole()))

    def _whole(self) -> bytes:
        content = self.path.read_bytes()
        return content[: content.rfind(b"\n") + 1]


def verdicts(events: Iterable[dict[str, Any]]) -> dict[Question, Record]:
    """The last verdict on each question."""
    found = (Record.from_json(event["record"]) for event in events if event["event"] == "verdict")
    return {question_of(record): record for record in found}


def _read(line: bytes) -> dict[str, Any]:
    """The event of a line.

    Raises:
        ValueError: it holds none.
    """
    try:
        plain = json.loads(line, parse_constant=_refuse)  # unlike msgspec it reads the half of a pair, as of a message
        event = msgspec.convert(plain, _Plan | _Resume | _Started | _Verdict | _Traced | _Heat | _GaveUp | _End)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    found: dict[str, Any] = msgspec.to_builtins(event)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"expected a number, got {constant}")


def _require_event(line: bytes, where: str) -> None:
    try:
        event = _read(line)
        if event["event"] == "verdict":
            Record.from_json(event["record"])
    except ValueError as error:
        raise JournalError(f"{where}: expected an event of a run as JSON, got {line[:80]!r}: {error}") from None
