"""The watchdog: a trial that hangs ends its process, whatever its threads do, and leaves their stacks behind.

The timer is faulthandler's, which needs no interpreter lock: it writes the stacks and ends the process at once.
"""

import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

WORKERS_FOLDER = "workers"
_FIRST_WORD = "Timeout"


def stacks_path(directory: Path, process: int) -> Path:
    """Where the watchdog of a process leaves the stacks of a trial that hung."""
    return directory / WORKERS_FOLDER / f"{process}.stacks"


def stacks_of(directory: Path, process: int) -> str:
    """The stacks at the moment the watchdog ended a process; empty if it did not."""
    path = stacks_path(directory, process)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text if text.startswith(_FIRST_WORD) else ""


@dataclass(frozen=True)
class Watchdog:
    """The timer of this process.

    Attributes:
        seconds: the longest that a trial may take.
        file: receives the stacks.
    """

    seconds: float
    file: TextIO

    @staticmethod
    def of(directory: Path, seconds: float) -> "Watchdog":
        """The watchdog of this process in a run's folder."""
        path = stacks_path(directory, os.getpid())
        path.parent.mkdir(exist_ok=True)
        return Watchdog(seconds, path.open("w", encoding="utf-8"))

    def arm(self) -> None:
        """Start the time of a trial."""
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    def disarm(self) -> None:
        """A trial has ended."""
        faulthandler.cancel_dump_traceback_later()
