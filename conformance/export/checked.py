"""Running a script as whoever receives it: in another process, to which this project is unknown."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ALONE = """
import os, runpy, sys
sys.modules["mla_conformance"] = None  # what imports it raises
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SECONDS = 600
"""A library may compile for minutes at its first call."""
WRONG, RIGHT = "WRONG", "right"
_STATUS = {WRONG: 1, RIGHT: 0}


@dataclass(frozen=True)
class Ran:
    """What a script did.

    Attributes:
        status: exit status.
        printed: all that it printed.
    """

    status: int
    printed: str

    @property
    def verdict(self) -> str:
        """WRONG or RIGHT, if it printed that and ended with the status for it; empty if it did anything else."""
        said = [line for line in self.printed.splitlines() if line in _STATUS][-1:]
        return said[0] if said and _STATUS[said[0]] == self.status else ""


def run_alone(script: Path) -> Ran:
    """Run a script without this project.

    Raises:
        subprocess.TimeoutExpired: it took longer than SECONDS.
    """
    command = [sys.executable, "-P", "-c", _ALONE, str(script)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, env={**os.environ}
    )
    return Ran(done.returncode, done.stdout)
