"""What a run knows: what its journal tells of its backends and cases, what they loaded, and what decides it.

What decides is loaded before a backend is; a file that is written over changes nothing of the run that goes on. The run
is refused all the same: what is written over by chance may have been read by halves, and what Python runs at its start
would decide the next one.
"""

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from mla_conformance.backends.roles import outside
from mla_conformance.diagnosis.heat_map import HeatMap
from mla_conformance.driving.loaded import Loaded
from mla_conformance.engine import journal
from mla_conformance.files.installed import file_digest, harness_files
from mla_conformance.files.places import is_file, place_of, sites
from mla_conformance.judging.record import Record, RecordKey, Traced
from mla_conformance.judging.traits import Traits
from mla_conformance.speed.times import Speed

_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "packaging", "rich")
"""What a report and a certificate are made with, beside the harness and Python."""
_RUN = (".pth", ".py", ".so")


def _searched() -> list[Path]:
    folders = {Path.cwd(), *(Path(entry).resolve() for entry in sys.path)}
    return sorted(folders, key=lambda folder: len(folder.parts), reverse=True)


@dataclass
class LoadedCode:
    """The code that the processes of a run, and of what it goes on with, have loaded, by SHA-256."""

    digests: dict[str, str] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)  # paths of which processes have loaded different bytes
    # that modules are looked for in, the deepest first; asked for when the run begins, since the current one may go
    folders: list[Path] = field(default_factory=_searched)

    def add(self, loaded: Loaded) -> None:
        """What a process has loaded; of what was generated meanwhile, only whether it replaced a file that counts."""
        found = [(path, digest, self.digests.setdefault(path, digest)) for path, digest in loaded.found.items()]
        made = [(path, digest, self.digests.get(path, digest)) for path, digest in loaded.generated.items()]
        self.conflicts |= {path for path, digest, before in (*found, *made) if digest != before}

    def changed(self) -> list[str]:
        """The paths whose bytes on disk differ from those that were loaded, or that are gone."""
        return [x for x, old in self.digests.items() if (file_digest(Path(x)) if is_file(Path(x)) else None) != old]

    @property
    def own(self) -> dict[str, str]:
        """SHA-256, by place, of the modules that are neither the harness's nor in a folder of wheels.

        Their place is in the deepest folder that modules are looked for in, so that it is called alike wherever it is.
        """
        shipped = {path.resolve() for path in harness_files().values()}
        modules = {Path(path): digest for path, digest in self.digests.items() if ".so" not in Path(path).suffixes}
        return {
            place_of(path, next((folder / "_" for folder in self.folders if path.is_relative_to(folder)), None)): digest
            for path, digest in sorted(modules.items())
            if path not in shipped and not any(path.is_relative_to(site) for site in sites())
        }


@dataclass(frozen=True)
class Installation:
    """The files that decide: SHA-256 of each; of those beside packages when each was changed last, in nanoseconds."""

    digests: dict[Path, str]
    beside: dict[Path, int]

    @staticmethod
    def now() -> "Installation":
        """As they are now: those of the harness, and of its libraries those that are loaded."""
        loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]
        paths = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
        roles = [Path(outside().partition("@")[0])] if outside() else []
        return Installation(
            {path: file_digest(path) for path in (*harness_files().values(), *paths, *roles)}, _beside()
        )

    def changed(self) -> list[Path]:
        """Files that came, went or hold other bytes since; sorted."""
        came = set(harness_files().values()) - self.digests.keys()
        kept = {path for path, digest in self.digests.items() if path.is_file() and file_digest(path) == digest}
        beside = {path for path, _ in self.beside.items() ^ _beside().items()}
        return sorted((self.digests.keys() - kept) | came | beside)


def _beside() -> dict[Path, int]:
    """Of Python's library, and of the folders of wheels without the packages in them."""
    folders: list[str | Path] = [*sites()]
    for folder, inner, _ in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        folders.append(folder)
    found = (entry for folder in folders for entry in os.scandir(folder) if entry.name.endswith(_RUN))
    return {Path(entry.path): entry.stat(follow_symlinks=False).st_ctime_ns for entry in found}


@dataclass
class Findings:
    """What is known of each backend, by its reference, and of each case."""

    verdicts: dict[RecordKey, Record] = field(default_factory=dict)
    code: LoadedCode = field(default_factory=LoadedCode)  # what the processes of backends have loaded
    traced: dict[str, Traced] = field(default_factory=dict)  # what was seen to run
    traits: dict[str, Traits] = field(default_factory=dict)  # when bits are the same, and how errors are spread
    speed: dict[str, Speed] = field(default_factory=dict)  # times of those that are right
    heat: dict[RecordKey, HeatMap] = field(default_factory=dict)  # where the errors of failures are
    given_up: dict[str, str] = field(default_factory=dict)  # why the rest of a backend's cases is not run

    def keep(self, event: journal.JournalEvent) -> None:
        if isinstance(event, journal.Judgement):
            self.verdicts[event.record.record_key] = event.record
        elif isinstance(event, journal.WasTraced):
            self.traced[event.backend] = event.traced
        elif isinstance(event, journal.Examined):
            self.traits[event.backend] = event.traits
        elif isinstance(event, journal.WasTimed):
            self.speed[event.backend] = event.speed
        elif isinstance(event, journal.HeatShown):
            self.heat[event.backend, event.case] = event.heat
        elif isinstance(event, journal.CodeLoaded):
            self.code.add(event.loaded)
        elif isinstance(event, journal.GaveUp):
            earlier = self.given_up.get(event.backend)
            self.given_up[event.backend] = f"{earlier}; {event.reason}" if earlier else event.reason

    @property
    def failures(self) -> list[Record]:
        return [record for record in self.verdicts.values() if record.failed]
