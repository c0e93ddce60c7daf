"""The log of a run: whatever the processes print is read, and only the first part of it is kept."""

import contextlib
import os
import threading
from pathlib import Path

KEPT_BYTES = 16 * 2**20
LOG_NAME = "run.log"
_BLOCK = 2**16
_JOIN_SECONDS = 5
_TAIL_LINES = 12


class BoundedLog:
    """Reads a pipe to its end in a thread of its own; the start of it goes into a file as soon as there is one.

    Attributes:
        descriptor: what processes write to.
    """

    def __init__(self) -> None:
        self._pipe, self.descriptor = os.pipe()
        self._early, self._path, self._left = b"", None, KEPT_BYTES  # type: bytes, Path | None, int
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def write_to(self, path: Path) -> None:
        """Keep what was printed before, and from now on, in a file."""
        with self._lock:
            self._path = path
            self._append(self._early)
            self._early = b""

    @property
    def tail(self) -> str:
        """The last lines so far."""
        with self._lock:
            text = self._early if self._path is None else self._path.read_bytes()
        return "\n".join(text.decode("utf-8", "replace").splitlines()[-_TAIL_LINES:])

    def _copy(self) -> None:
        while block := os.read(self._pipe, _BLOCK):
            with self._lock:
                kept = block[: self._left]
                self._left -= len(kept)
                if self._path is None:
                    self._early += kept
                else:
                    self._append(kept)
        os.close(self._pipe)

    def _append(self, block: bytes) -> None:
        assert self._path is not None
        if block:
            with contextlib.suppress(OSError), self._path.open("ab") as file:  # a full disk costs the log, not the run
                file.write(block)

    def close(self) -> None:
        """Wait for what was printed last."""
        os.close(self.descriptor)
        self._thread.join(_JOIN_SECONDS)
