"""The folder of a run, in use by one run at a time and never written over; what the run knows; and what decides it."""

import contextlib
import fcntl
import os
import secrets
import shutil
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mla_conformance.backends.roles import outside
from mla_conformance.driving.loaded import Loaded
from mla_conformance.engine import journal
from mla_conformance.engine.journal import JOURNAL_NAME, Journal
from mla_conformance.engine.messages import Found
from mla_conformance.files.places import file_digest, harness_files, is_file, place_of, sites
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Record, RecordKey

RUNS = Path("build/mla-conformance")  # where runs stand for which no folder was named
LATEST = "latest"
REPORT_NAME, PAGE_NAME, LOG_NAME = "report.json", "report.html", "run.log"
_FILES = (JOURNAL_NAME, LOG_NAME, REPORT_NAME, PAGE_NAME)
_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "packaging", "rich")
"""What a report and a certificate are made with, beside the harness and Python."""
_RUN = (".pth", ".py", ".so")


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
        with contextlib.suppress(OSError):
            if self.fresh:
                self.path.rmdir()


@dataclass
class LoadedCode:
    digests: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)  # paths of which processes have loaded different bytes
    # that modules are looked for in; asked for when the run begins, since the current one may go
    folders: list[Path] = field(default_factory=lambda: [Path.cwd(), *(Path(entry).resolve() for entry in sys.path)])

    def add(self, loaded: Loaded) -> None:
        """What a process has loaded; of what was generated meanwhile, only whether it replaced a file that counts."""
        found = [(path, digest, self.digests.setdefault(path, digest)) for path, digest in loaded.found.items()]
        made = [(path, digest, self.digests.get(path, digest)) for path, digest in loaded.generated.items()]
        self.conflicts |= {path for path, digest, before in (*found, *made) if digest != before}

    def changed(self) -> list[str]:
        return [x for x, old in self.digests.items() if not is_file(Path(x)) or file_digest(Path(x)) != old]

    @property
    def own(self) -> dict[str, str]:
        """SHA-256, by place, of the modules that are neither the harness's nor in a folder of wheels.

        Their place is in the deepest folder that modules are looked for in, so that it is called alike wherever it is.
        """
        shipped, found = {path.resolve() for path in harness_files().values()}, dict[str, str]()
        for path, digest in sorted((Path(path), digest) for path, digest in self.digests.items()):
            if not (".so" in path.suffixes or path in shipped or any(path.is_relative_to(site) for site in sites())):
                around = [folder for folder in self.folders if path.is_relative_to(folder)]
                deepest = max(around, key=lambda folder: len(folder.parts), default=None)
                found[place_of(path, deepest and deepest / "_")] = digest
        return found


def deciding_files(before: Mapping[Path, str | int] = MappingProxyType({})) -> dict[Path, str | int]:
    """SHA-256 of the harness's files and of what is loaded of its libraries, or was ``before``; and what stands beside.

    That is Python's library and folders of wheels, with the nanosecond of each last change. A file that is written over
    changes nothing of the run that goes on, since what decides is loaded before a backend is. The run is refused all
    the same: it may have been read by halves, and what Python runs at its start would decide the next one.
    """
    loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]
    others = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
    others += [Path(outside().partition("@")[0])] if outside() else []
    if before:
        others = [path for path, held in before.items() if isinstance(held, str)]
    held = {path: file_digest(path) for path in (*harness_files().values(), *others) if path.is_file()}
    folders: list[str | Path] = [*sites()]
    for folder, inner, _ in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        folders.append(folder)
    beside = (entry for folder in folders for entry in os.scandir(folder) if entry.name.endswith(_RUN))
    return {Path(entry.path): entry.stat(follow_symlinks=False).st_ctime_ns for entry in beside} | held


@dataclass
class Findings:
    verdicts: dict[RecordKey, Record] = field(default_factory=dict)
    code: LoadedCode = field(default_factory=LoadedCode)  # what the processes of backends have loaded
    further: dict[RecordKey, Found] = field(default_factory=dict)  # of backends, without a case, and of cases
    given_up: dict[str, str] = field(default_factory=dict)  # why the rest of a backend's cases is not run

    def of(self, backend: str, case: str = "") -> Found:
        return self.further.get((backend, case), Found())

    def keep(self, event: journal.JournalEvent) -> None:
        if isinstance(event, journal.Judgement):
            self.verdicts[event.record.record_key] = event.record
        elif isinstance(event, journal.Learned):
            self.further[event.backend, event.case] = self.of(event.backend, event.case).joined(event.found)
        elif isinstance(event, journal.CodeLoaded):
            self.code.add(event.loaded)
        elif isinstance(event, journal.GaveUp):
            earlier = self.given_up.get(event.backend)
            self.given_up[event.backend] = f"{earlier}; {event.reason}" if earlier else event.reason
