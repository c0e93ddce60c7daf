"""The journal: one JSON line per event, written before a launch and after a verdict, so that a crash loses nothing.

Workers and controller append to one file; a line is written in one call, which the system does not tear apart.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOURNAL_NAME = "journal.jsonl"


@dataclass(frozen=True)
class Journal:
    """The event file of a run."""

    path: Path

    @staticmethod
    def inside(directory: Path) -> "Journal":
        """The journal of an output folder."""
        return Journal(directory / JOURNAL_NAME)

    def append(self, event: str, **fields: Any) -> None:
        """Write one event and hand it to the system."""
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = json.dumps({"event": event, **fields}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)

    def events(self) -> Iterator[dict[str, Any]]:
        """All whole events so far; a last line that was cut off is left out."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="ascii", errors="replace").split("\n"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
