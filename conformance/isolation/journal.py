"""The journal: one JSON line per event, written before a launch and after a verdict, so that a crash loses nothing.

Workers and controller append to one file; a line is written in one call, which the system does not tear apart.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.judging.record import Record

JOURNAL_NAME = "journal.jsonl"
JOURNAL_LOST = 74
"""Exit status of a run's pytest when the journal cannot be written."""


class JournalError(ValueError):
    """A journal that no run wrote as it stands."""


@dataclass(frozen=True)
class Journal:
    """The event file of a run."""

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
        if self.path.exists():
            yield from _events(self.path.read_bytes())

    def events_from(self, position: int) -> tuple[list[dict[str, Any]], int]:
        """The events of whole lines from a byte of the file on, and the byte where the next line starts."""
        with self.path.open("rb") as file:
            file.seek(position)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        return list(_events(whole)), position + len(whole)

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

    def settled(self) -> set[tuple[str, str, str]]:
        """(backend reference, capability, case id) of every verdict before the last resumption, if any.

        Every process of a resumed run reads the same, since nothing before that event changes any more.
        """
        found: set[tuple[str, str, str]] = set()
        before_resume: set[tuple[str, str, str]] = set()
        for event in self.events():
            if event["event"] == "verdict":
                found.add(Record.from_json(event["record"]).question)
            elif event["event"] == "resume":
                before_resume = set(found)
        return before_resume


def _events(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.decode("ascii", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def _require_event(line: bytes, where: str) -> None:
    try:
        event = json.loads(line)
        if event["event"] == "verdict":
            Record.from_json(event["record"])
    except (ValueError, TypeError, KeyError) as error:
        raise JournalError(f"{where}: expected an event of a run as JSON, got {line[:80]!r} ({error!r})") from None
