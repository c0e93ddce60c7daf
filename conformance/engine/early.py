"""The first process of a run, started before the command itself is imported: torch takes longer than all else.

Nothing is imported here but Python's own modules.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_JUDGING = ("certify", "replay", "watch")
"""Commands of which most runs need the process; one that does not ends it with itself."""


class EarlyKeeper(NamedTuple):
    """A keeper that waits to be told what it is for.

    Attributes:
        process: the keeper.
        connection: to it.
        log: both ends of the pipe that it prints to.
    """

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    log: tuple[int, int]


_begun: list[EarlyKeeper] = []


def begin(arguments: Sequence[str]) -> None:
    """Start one if a command line is of a command that judges."""
    if not arguments or arguments[0] not in _JUDGING or not {"-h", "--help"}.isdisjoint(arguments):
        return
    log, (connection, remote) = os.pipe(), socket.socketpair()
    _begun.append(EarlyKeeper(start_keeper(remote.fileno(), log[1], os.environ), connection, log))
    remote.close()


def take() -> EarlyKeeper | None:
    """The one that was started, for the first run that asks; None if there is none."""
    return _begun.pop() if _begun else None


def start_keeper(descriptor: int, log: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """A new process that speaks over a socket and prints to ``log``."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "mla_conformance.engine.keeper", str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=[descriptor],
        start_new_session=True,
    )
