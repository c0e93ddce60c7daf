"""The console script, and ``python -m mla_conformance`` in an environment that has none."""

import os
import sys
from typing import NoReturn

from mla_conformance.engine.keeper import begin
from mla_conformance.files.places import forget_current_folder


def start() -> NoReturn:
    """Carry out the command line; who ends it while it is imported is told nothing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: a place is held, or the next file would take it, with what cannot be written
            os.open(os.devnull, os.O_RDONLY)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115 - a descriptor
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115
    try:
        forget_current_folder()
        begin(sys.argv[1:])
        from mla_conformance.cli import command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose files would stand in for those of libraries
    start()
