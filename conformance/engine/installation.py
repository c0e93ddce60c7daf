"""What decides a run, as it stood when the run began: nothing of it may be another at its end.

All of it is loaded before a backend is; a file that is written over changes nothing of the run that goes on. The run is
refused all the same: what is written over by chance may have been read by halves, and what Python runs when it starts
would decide the next one.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.installed import file_digest, harness_files
from mla_conformance.files.places import sites

_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "packaging", "rich")
"""What a report and a certificate are made with, beside the harness and Python."""
_RUN = (".pth", ".py", ".so")


@dataclass(frozen=True)
class Installation:
    """The files that decide.

    Attributes:
        digests: SHA-256 of each, by its path.
        beside: of Python's library, and of what lies beside packages, when each file was changed last, in nanoseconds.
    """

    digests: dict[Path, str]
    beside: dict[Path, int]

    @staticmethod
    def now() -> "Installation":
        """As they are now: those of the harness, and of its libraries those that are loaded."""
        loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]
        paths = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
        return Installation({path: file_digest(path) for path in (*harness_files().values(), *paths)}, _beside())

    def changed(self) -> list[Path]:
        """Files that came, went or hold other bytes since; sorted."""
        came = set(harness_files().values()) - self.digests.keys()
        kept = {path for path, digest in self.digests.items() if path.is_file() and file_digest(path) == digest}
        beside = {path for path, _ in self.beside.items() ^ _beside().items()}
        return sorted((self.digests.keys() - kept) | came | beside)


def _beside() -> dict[Path, int]:
    found = (entry for folder in _folders() for entry in os.scandir(folder) if entry.name.endswith(_RUN))
    return {Path(entry.path): entry.stat(follow_symlinks=False).st_ctime_ns for entry in found}


def _folders() -> Iterator[str | Path]:
    """Those of Python's library, and those of wheels without the packages in them."""
    yield from sites()
    for folder, inner, _ in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        yield folder
