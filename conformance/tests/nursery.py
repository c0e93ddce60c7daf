"""Keepers of runs within tests, forked from one process that has imported everything: an import takes 3 s of CPU time.

A keeper is what :func:`mla_conformance.engine.place.start_keeper` starts, and does the same: it is a child of the
process of the tests, which adopts orphans while a run goes on. Runs that tests start by the command begin as a user's.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUEST = 2**20
_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "LC_", "LANG", "LD_")
"""Beginnings of the names of variables that are read when Python or a library starts."""


class ForkedKeeper:
    """What is used of ``subprocess.Popen`` for a keeper; ``pid`` is its process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        """As long as it was not waited for."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """By SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """By SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = float("inf")) -> int:
        """Its exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        end = time.monotonic() + timeout
        while self._status is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("keeper", timeout)
            else:
                time.sleep(0.005)
        return self._status


class Nursery:
    """The process that forks; it ends with the one that has started it."""

    def __init__(self) -> None:
        self._socket, remote = socket.socketpair()
        self._variables = _read_at_import(os.environ)
        command = [sys.executable, "-P", "-m", __name__, str(remote.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[remote.fileno()], start_new_session=True)
        remote.close()

    def forks_for(self, environment: Mapping[str, str]) -> bool:
        """Whether its keepers would start as they do with these variables."""
        return self._variables == _read_at_import(environment)

    def start_keeper(self, descriptor: int, log: int, environment: Mapping[str, str]) -> ForkedKeeper:
        """As that of the module ``place``."""
        request = {"environment": dict(environment), "folder": str(Path.cwd()), "supervisor": os.getpid()}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [descriptor, log])
        return ForkedKeeper(int(self._socket.recv(32)))

    def end(self) -> None:
        """End it; its keepers are ended by then."""
        self._socket.close()
        self._process.wait()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


def main(descriptor: int) -> None:
    """Fork keepers until the other end is closed."""
    from mla_conformance.engine import keeper
    from mla_conformance.engine.messages import Setup
    from mla_conformance.engine.worker import load_all

    load_all(Setup("cpu", draws=True))
    connection = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST, 2)
        if not request:
            return
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(tell, str(child).encode())
                os._exit(0)
            os.close(connection.detach())
            _become(json.loads(request), *descriptors)
            keeper.main(descriptors[0], json.loads(request)["supervisor"])
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(told, 32))
        for number in (told, tell, *descriptors):
            os.close(number)


def _become(request: dict[str, Any], descriptor: int, log: int) -> None:
    """A process as ``Popen`` would have started it, once its parent is who asked for it."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, log, log)):
        os.dup2(source, number)
    os.close(log)
    os.close(nothing)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    while os.getppid() not in (1, request["supervisor"]):
        time.sleep(0.001)


if __name__ == "__main__":
    main(int(sys.argv[1]))
