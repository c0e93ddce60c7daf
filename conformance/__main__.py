"""The console script, and ``python -m mla_conformance`` in an environment that has none."""

import sys
from typing import NoReturn


def start() -> NoReturn:
    """Carry out the command line; who ends it while it is imported is told nothing."""
    try:
        from mla_conformance.cli import command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    start()
