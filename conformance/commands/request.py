"""What the commands share: a checked selection, an output folder, and running it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_conformance.files.inputs import InputError

if TYPE_CHECKING:
    from mla_conformance.running.certify import Run
    from mla_conformance.running.selection import Selection

DEFAULT_OUT = Path("build/mla-conformance")
REFERENCE = "NAME|module:Class|file.py:Class"


def select(
    backends: Sequence[str],
    device: str | None,
    capabilities: Sequence[str] = (),
    tier: str = "full",
    cases: Sequence[str] = (),
    explore: int = 0,
) -> "Selection":
    """The selection that options ask for.

    Raises:
        InputError: something in it is unknown or malformed.
    """
    from mla_conformance.running.selection import Selection, SelectionError

    try:
        return Selection.of(backends, capabilities, tier, device, cases, explore)
    except SelectionError as error:
        raise InputError(str(error)) from error


def require_timeout(seconds: float | None) -> None:
    """Check ``--timeout``.

    Raises:
        InputError: no time that a case could take.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError(f"--timeout: expected a positive number of seconds, got {seconds:g}")


def require_writable(path: Path) -> None:
    """Make the output folder, and prove it writable before anything is run.

    Raises:
        InputError: it is not.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"--out {path}: expected a writable folder: {error.strerror}") from error


def carry_out(run: "Run", **how: bool) -> int:
    """Run it and show its outcome; the exit status.

    Raises:
        InputError: pytest refused the arguments.
    """
    from mla_conformance.commands.console import run_and_report
    from mla_conformance.running.certify import RunError

    try:
        return run_and_report(run, **how)
    except RunError as error:
        raise InputError(str(error)) from error
