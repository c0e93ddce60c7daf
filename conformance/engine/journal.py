"""The journal: one JSON line per event, written by the supervisor alone, so that a crash loses nothing."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.judging.record import Question, Record
from mla_conformance.judging.traced import Traced
from mla_conformance.report.heat_map import HeatMap

JOURNAL_NAME = "journal.jsonl"


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    pass


class Planned(_Event, frozen=True, tag="plan"):
    """A run begins; what it is to judge, in the form of its time."""

    plan: dict[str, Any]


class Resumed(_Event, frozen=True, tag="resume"):
    """An interrupted run goes on."""


class CaseStarted(_Event, frozen=True, tag="started"):
    """A backend's time on a case begins."""

    case: str
    backend: str


class Judgement(_Event, frozen=True, tag="verdict"):
    """A verdict, which replaces earlier ones on the same question."""

    record: Record


class WasTraced(_Event, frozen=True, tag="traced"):
    """What a backend, by reference, was seen to run."""

    backend: str
    traced: Traced


class HeatShown(_Event, frozen=True, tag="heat"):
    """Where the errors of a failure are."""

    backend: str
    case: str
    heat: HeatMap


class GaveUp(_Event, frozen=True, tag="gave_up"):
    """The rest of a backend's cases is not run."""

    backend: str
    reason: str


class Completed(_Event, frozen=True, tag="end"):
    """The run came to its end."""


Event = Planned | Resumed | CaseStarted | Judgement | WasTraced | HeatShown | GaveUp | Completed


class JournalError(ValueError):
    """A journal that no run wrote as it stands."""


class UnwrittenError(OSError):
    """The system did not take a line."""


@dataclass(frozen=True)
class Journal:
    """The event file of a run: its plan, each start and each verdict, what was given up, and its end."""

    path: Path

    @staticmethod
    def inside(directory: Path) -> "Journal":
        """The journal of an output folder."""
        return Journal(directory / JOURNAL_NAME)

    def append(self, event: Event) -> None:
        """Write one event and hand it to the system.

        Raises:
            UnwrittenError: the system did not take the whole line.
        """
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = (json.dumps(msgspec.to_builtins(event)) + "\n").encode("ascii")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnwrittenError(error.errno, error.strerror, error.filename) from error

    def events(self) -> Iterator[Event]:
        """All whole events so far; a last line that was cut off is left out."""
        for line in self._whole().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield _read(line)

    def records(self) -> dict[Question, Record]:
        """The last verdict on each question."""
        return {event.record.question: event.record for event in self.events() if isinstance(event, Judgement)}

    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return [type(event) for event in self.events()][-1:] == [Completed]

    def check(self) -> None:
        """Read every line but one at the end that was cut off.

        Raises:
            JournalError: a line is no event.
        """
        for number, line in enumerate(self._whole().splitlines(), start=1):
            try:
                _read(line)
            except ValueError as error:
                where = f"{self.path}, line {number}"
                what = f"expected an event of a run as JSON, got {line[:80]!r}: {error}"
                raise JournalError(f"{where}: {what}") from None

    def repair(self) -> None:
        """Remove a last line that was cut off, so that the next event starts a line of its own."""
        os.truncate(self.path, len(self._whole()))

    def _whole(self) -> bytes:
        content = self.path.read_bytes()
        return content[: content.rfind(b"\n") + 1]


def _read(line: bytes) -> Event:
    """The event of a line.

    Raises:
        ValueError: it holds none.
    """
    try:
        plain = json.loads(line, parse_constant=_refuse)  # unlike msgspec it reads the half of a pair, as of a message
        event: Event = msgspec.convert(plain, Event)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"expected a number, got {constant}")
