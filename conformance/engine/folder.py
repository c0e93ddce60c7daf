"""The folder of a run: of its own, in use by one run at a time, and never written over; and the log in it."""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.engine.journal import JOURNAL_NAME, Journal
from mla_conformance.files.inputs import InputError

RUNS = Path("build/mla-conformance")  # where runs stand for which no folder was named
LATEST = "latest"
REPORT_NAME, PAGE_NAME, LOG_NAME = "report.json", "report.html", "run.log"
_FILES = (JOURNAL_NAME, LOG_NAME, REPORT_NAME, PAGE_NAME)
KEPT_BYTES = 16 * 2**20  # of what the processes print
_BLOCK = 2**16
_JOIN_SECONDS = 5
_TAIL_LINES = 12


@dataclass
class RunFolder:
    path: Path
    lock: int  # descriptor that holds it; -1 once it is released
    fresh: bool  # it was made for this run
    journal: Journal

    @staticmethod
    def claim(named: Path | None, resume: bool = False, anew: bool = False) -> "RunFolder":
        """Take a folder: the one that was named, or a new one among the :data:`RUNS`.

        Args:
            named: the folder of ``--out`` or ``--resume``.
            resume: go on with the run in it.
            anew: keep an unfinished run beside, as a finished one is, and start another.

        Raises:
            InputError: it cannot be written, another run uses it, or it holds an unfinished run.
        """
        path = named or RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path = Path(os.path.realpath(path))
            fresh = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDONLY)
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise InputError(f"--out {path}: expected a writable folder: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise InputError(f"--out {path}: another run is writing into it; name another folder") from None
        folder = RunFolder(path, lock, fresh, Journal.inside(path))
        if not (resume or anew) and folder.journal.path.exists() and not folder.journal.is_finished():
            raise InputError(
                f"--out {path}: it holds an unfinished run; "
                f"--resume {path} continues it, --fresh sets it aside and starts another"
            )
        return folder

    def begin(self) -> None:
        """Keep an earlier run's files in a folder beside, and let ``latest`` name this run."""
        earlier = [path for name in _FILES if (path := self.path / name).exists()] + self.journal.seals
        if earlier:
            moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(min(file.stat().st_mtime for file in earlier)))
            beside = self.path.with_name(f"{self.path.name}-{moment}-{secrets.token_hex(2)}")
            beside.mkdir()
            for file in earlier:
                shutil.move(file, beside / file.name)
        if self.path.parent == RUNS.resolve():
            link = self.path.with_name(f"{LATEST}-{secrets.token_hex(2)}")
            with contextlib.suppress(OSError):  # a system without links
                link.symlink_to(self.path.name)
                link.replace(self.path.with_name(LATEST))

    def discard(self) -> None:
        """Give back a folder in which nothing was begun."""
        with contextlib.suppress(OSError):
            if self.fresh:
                self.path.rmdir()
        self.release()

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


class BoundedLog:
    """Reads a pipe that processes print to; the first part of it goes into a file as soon as there is one."""

    def __init__(self, pipe: tuple[int, int]) -> None:
        self._pipe, self.descriptor = pipe
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
