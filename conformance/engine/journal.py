"""The folder of a run, in use by one run at a time and never written over; its journal; and what the run knows.

The journal has one JSON line per event, first the plan, written by the supervisor alone, so that a crash loses nothing.
It is sealed, since a kernel may write into the file: each line names the digest of the one before, and a named pipe
beside the file the digest of the last. The process of a kernel cannot make named pipes.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mla_conformance.driving.loaded import Loaded, LoadedCode
from mla_conformance.engine.messages import Found
from mla_conformance.files.whole import InputError, open_regular, write_whole
from mla_conformance.judging.record import Record, RecordKey

JOURNAL_NAME, LATEST = "journal.jsonl", "latest"
RUNS = Path("build/mla-conformance")  # where runs stand for which no folder was named
REPORT_NAME, PAGE_NAME, LOG_NAME = "report.json", "report.html", "run.log"
_FILES = (JOURNAL_NAME, LOG_NAME, REPORT_NAME, PAGE_NAME)


class _Event(msgspec.Struct, frozen=True, tag_field="event"): ...


class Planned(_Event, frozen=True, tag="plan"):
    plan: dict[str, Any]  # what is to be judged, in the form of its time


class Resumed(_Event, frozen=True, tag="resume"): ...


class CaseStarted(_Event, frozen=True, tag="started"):
    case: str
    backend: str


class Judgement(_Event, frozen=True, tag="verdict"):
    record: Record  # which replaces earlier ones on the same question


class Learned(_Event, frozen=True, tag="learned"):
    backend: str
    found: Found
    case: str = ""  # that it is about; empty for the backend as a whole


class CodeLoaded(_Event, frozen=True, tag="loaded"):
    loaded: Loaded  # by a process of the backends, what no earlier event tells of


class GaveUp(_Event, frozen=True, tag="gave_up"):
    backend: str
    reason: str


class Completed(_Event, frozen=True, tag="end"): ...


class Reported(_Event, frozen=True, tag="report"):
    sha256: str


JournalEvent = Planned | Resumed | CaseStarted | Judgement | Learned | CodeLoaded | GaveUp | Completed | Reported


class UnwrittenError(OSError):
    """The system did not take a line."""


@dataclass
class Journal:
    path: Path
    _last: str = ""

    def append(self, event: JournalEvent) -> None:
        """Write one event behind those that this object wrote or took up, and hand it to the system."""
        # ASCII: half a line is still text, and nothing but a newline ends one.
        line = json.dumps({"after": self._last, **msgspec.to_builtins(event)}).encode("ascii")
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(descriptor, line + b"\n") <= len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnwrittenError(error.errno, error.strerror, error.filename) from error
        self._seal(hashlib.sha256(line).hexdigest())

    def _seal(self, last: str) -> None:
        """Have the pipe beside the file name the digest of its last line, which is there already."""
        before, seal = self.seals, self.path.with_name(f".{self.path.name}-{last}")
        if seal not in before:
            with contextlib.suppress(OSError):  # a file system without: nothing is sealed, and no run goes on with it
                os.mkfifo(seal)
        for path in before:
            if path != seal:
                with contextlib.suppress(OSError):  # a kernel may have closed the folder: what was sealed stays so
                    path.unlink()
        self._last = last

    @property
    def seals(self) -> list[Path]:
        found = []
        for path in self.path.parent.glob(f".{self.path.name}-*"):
            with contextlib.suppress(OSError):  # a kernel may make and remove files of such names
                if stat.S_ISFIFO(path.lstat().st_mode):  # a pipe itself, no link to one
                    found.append(path)
        return found

    def events(self) -> Iterator[JournalEvent]:
        """All whole events so far, whoever wrote them; a last line that was cut off is left out."""
        for line in self._lines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield _read(line)

    def is_finished(self) -> bool:
        return [type(event) for event in self.events() if type(event) is not Reported][-1:] == [Completed]

    def sealed(self) -> dict[int, JournalEvent]:
        """The events that runs wrote, each by the number of its line, counted from 1."""
        sealed, found = {path.name.rpartition("-")[2] for path in self.seals}, dict[int, JournalEvent]()
        for number, line in reversed(list(enumerate(self._lines(), start=1))):
            if hashlib.sha256(line).hexdigest() not in sealed:
                continue
            try:
                found[number] = _read(line)
            except ValueError as error:
                what = f"expected an event of a run as JSON, got {line[:80]!r}: {error}"
                raise InputError(f"{self.path}, line {number}: {what}") from None
            sealed = {json.loads(line).get("after")}
        if sealed != {""}:
            expected = f"a journal as its run left it, with its seal beside it, a named pipe .{self.path.name}-…"
            said = "it was changed, cut or moved, or of an older version: start the run anew"
            raise InputError(f"{self.path}: expected {expected}; {said}")
        return dict(sorted(found.items()))

    def take_up(self) -> list[int]:
        """Keep of the file what runs wrote, which is sealed, for the next event behind it; numbers of lines that go."""
        lines, kept = self._lines(), self.sealed()
        write_whole(self.path, "".join(f"{lines[number - 1].decode('ascii')}\n" for number in kept))
        self._seal(hashlib.sha256(lines[max(kept) - 1]).hexdigest())
        return [number for number in range(1, len(lines) + 1) if number not in kept]

    def _lines(self) -> list[bytes]:
        with open_regular(self.path) as file:
            content = file.read()
        return content[: content.rfind(b"\n") + 1].splitlines()


def _read(line: bytes) -> JournalEvent:
    def refuse(constant: str) -> None:
        raise ValueError(f"expected a number, got {constant}")

    try:  # unlike msgspec json reads the half of a pair, as of a message
        return msgspec.convert(json.loads(line, parse_constant=refuse), JournalEvent)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@dataclass
class RunFolder:
    path: Path
    lock: int  # descriptor that holds it, to be closed in the end
    fresh: bool  # it was made for this run
    journal: Journal

    @staticmethod
    def claim(named: Path | None, resume: bool = False, anew: bool = False) -> "RunFolder":
        """Take the folder of ``--out`` or ``--resume``, or a new one; one ``anew`` keeps an unfinished run beside."""
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
        folder = RunFolder(path, lock, fresh, Journal(path / JOURNAL_NAME))
        if not (resume or anew) and folder.journal.path.exists() and not folder.journal.is_finished():
            said = f"--resume {path} continues it, --fresh sets it aside and starts another"
            raise InputError(f"--out {path}: it holds an unfinished run; {said}")
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
        with contextlib.suppress(OSError):
            if self.fresh:
                self.path.rmdir()


@dataclass
class Findings:
    verdicts: dict[RecordKey, Record] = field(default_factory=dict)
    code: LoadedCode = field(default_factory=LoadedCode)  # what the processes of backends have loaded
    further: dict[RecordKey, Found] = field(default_factory=dict)  # of backends, without a case, and of cases
    given_up: dict[str, str] = field(default_factory=dict)  # why the rest of a backend's cases is not run

    def of(self, backend: str, case: str = "") -> Found:
        return self.further.get((backend, case), Found())

    def keep(self, event: JournalEvent) -> None:
        if isinstance(event, Judgement):
            self.verdicts[event.record.record_key] = event.record
        elif isinstance(event, Learned):
            self.further[event.backend, event.case] = self.of(event.backend, event.case).joined(event.found)
        elif isinstance(event, CodeLoaded):
            self.code.add(event.loaded)
        elif isinstance(event, GaveUp):
            earlier = self.given_up.get(event.backend)
            self.given_up[event.backend] = f"{earlier}; {event.reason}" if earlier else event.reason
