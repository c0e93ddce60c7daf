"""What decides a run, as it stood when the run began: nothing of it may be another at its end.

All of it is loaded before a backend is; a file that is written over changes nothing of the run that goes on. The run is
refused all the same: what is written over by chance may have been read by halves.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from mla_conformance.files.installed import file_digest, harness_files

_LIBRARIES = ("jinja2", "markupsafe", "msgspec", "packaging", "rich")
"""What a report and a certificate are made with, beside the harness and Python."""


@dataclass(frozen=True)
class Installation:
    """The files that decide.

    Attributes:
        digests: SHA-256 of each, by its path.
    """

    digests: dict[Path, str]

    @staticmethod
    def now() -> "Installation":
        """As they are now: those of the harness, and of its libraries those that are loaded."""
        loaded = [module for name, module in sys.modules.items() if name.partition(".")[0] in _LIBRARIES]
        paths = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
        return Installation({path: file_digest(path) for path in (*harness_files().values(), *paths)})

    def changed(self) -> list[Path]:
        """Files that came, went or hold other bytes since; sorted."""
        came = set(harness_files().values()) - self.digests.keys()
        kept = {path for path, digest in self.digests.items() if path.is_file() and file_digest(path) == digest}
        return sorted((self.digests.keys() - kept) | came)
