"""The log of a run: whatever the processes print is read, and only the first part of it is kept."""

import contextlib
import threading
from collections import deque
from io import BufferedReader, FileIO
from pathlib import Path

KEPT_BYTES = 16 * 2**20
_BLOCK = 2**16
_TAIL_BLOCKS = 2
_TAIL_LINES = 12
_JOIN_SECONDS = 10


class BoundedLog:
    """Reads a pipe to its end in a thread of its own; keeps the start in a file and the end in memory."""

    def __init__(self, path: Path, pipe: BufferedReader) -> None:
        self._file, self._pipe = FileIO(path, "w"), pipe
        self._tail: deque[bytes] = deque(maxlen=_TAIL_BLOCKS)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        left = KEPT_BYTES
        with self._file, self._pipe:
            while block := self._pipe.read1(_BLOCK):
                self._tail.append(block)
                self._keep(block[:left])
                left -= len(block[:left])

    def _keep(self, block: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the log and not the run
            self._file.write(block)

    def close(self) -> str:
        """Wait for the end, and return the last lines."""
        self._thread.join(_JOIN_SECONDS)
        lines = b"".join(self._tail).decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])
