"""The console script, and ``python -m mla_conformance`` in an environment that has none."""

import sys
from typing import NoReturn

from mla_conformance.files.places import forget_current_folder


def start() -> NoReturn:
    """Carry out the command line; who ends it while it is imported is told nothing."""
    try:
        forget_current_folder()
        from mla_conformance.cli import command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    start()
