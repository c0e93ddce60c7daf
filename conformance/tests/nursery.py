"""Keepers and commands of tests, forked from one process that has imported everything: an import takes 3 s of CPU time.

A keeper is what :func:`mla_conformance.engine.place.start_keeper` starts, and does the same: it is a child of the
process of the tests, which adopts orphans while a run goes on. A command is a script that stands for the console
script, for tests of what commands do one after another, in scripts and pages. Tests of how a command starts, of what
it imports and of signals run the console script itself.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_REQUEST = 2**20
_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "LC_", "LANG", "LD_")
"""Beginnings of the names of variables that are read when Python or a library starts."""
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
variables = {{name: value for name, value in os.environ.items() if name.startswith({at_import})}}
if variables != {variables}:  # it would start otherwise than what is forked
    os.execv({command!r}, [{command!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\\0{address}")
heeded = [number for number in {signals} if signal.getsignal(number) != signal.SIG_IGN]
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "heeded": heeded}}
socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
process = int(connection.recv(32))
for number in heeded:
    signal.signal(number, lambda number, _: os.kill(process, number))
status = int(connection.recv(32))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""Has its arguments, folder, variables and standard streams taken over by a forked process, and ends as that does.

Signals are passed on, and who kills the one kills the other.
"""
_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))


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
        self._address = f"mla-conformance-{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{self._address}")  # no file, so that nothing is left of it
        listener.listen()
        descriptors = [remote.fileno(), listener.fileno()]
        command = [sys.executable, "-P", "-m", __name__, *map(str, descriptors)]
        self._process = subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)
        remote.close()
        listener.close()

    def forks_for(self, environment: Mapping[str, str]) -> bool:
        """Whether its keepers would start as they do with these variables."""
        return self._variables == _read_at_import(environment)

    def start_keeper(self, descriptor: int, log: int, environment: Mapping[str, str]) -> ForkedKeeper:
        """As that of the module ``place``."""
        return _ask_for_keeper(self._socket, descriptor, log, environment)

    def write_command(self, path: Path, command: Path) -> None:
        """A script that does as ``command`` does, the console script, but in a forked process."""
        text = _COMMAND.format(
            python=sys.executable, at_import=_AT_IMPORT, variables=self._variables, command=str(command),
            address=self._address, signals=_SIGNALS,
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def end(self) -> None:
        """End it; its keepers are ended by then."""
        self._socket.close()
        self._process.wait()


def _ask_for_keeper(connection: socket.socket, descriptor: int, log: int, environment: Mapping[str, str]) -> Any:
    request = {"environment": dict(environment), "folder": str(Path.cwd()), "supervisor": os.getpid()}
    socket.send_fds(connection, [json.dumps(request).encode()], [descriptor, log])
    return ForkedKeeper(int(connection.recv(32)))


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


def main(descriptor: int, listening: int) -> None:
    """Fork keepers and commands until the other end is closed."""
    from mla_conformance.engine.messages import Setup
    from mla_conformance.engine.worker import load_all
    from mla_conformance.vocabulary.capabilities import CAPABILITIES

    connection, listener = socket.socket(fileno=descriptor), socket.socket(fileno=listening)
    load_all(Setup("cpu", draws=True))
    for capability in CAPABILITIES.values():
        assert capability.cases  # the lists are made once for all
    gc.freeze()
    while True:
        readable, _, _ = select.select([connection, listener], [], [])
        if listener in readable:
            with listener.accept()[0] as caller:
                if not os.fork():
                    os.close(connection.detach())
                    os.close(listener.detach())
                    _carry_out(caller)
        elif not _fork_keeper(connection):
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_keeper(connection: socket.socket) -> bool:
    """Fork what is asked for; whether anything was."""
    from mla_conformance.engine import keeper

    request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST, 2)
    if not request:
        return False
    told, tell = os.pipe()
    between = os.fork()
    if not between:
        if child := os.fork():
            os.write(tell, str(child).encode())
            os._exit(0)
        os.close(connection.detach())
        asked = json.loads(request)
        _become(asked["environment"], asked["folder"], os.open(os.devnull, os.O_RDONLY), descriptors[1], descriptors[1])
        while os.getppid() not in (1, asked["supervisor"]):
            time.sleep(0.001)
        keeper.main(descriptors[0], asked["supervisor"])
        os._exit(0)
    os.waitpid(between, 0)
    connection.sendall(os.read(told, 32))
    for number in (told, tell, *descriptors):
        os.close(number)
    return True


def _carry_out(caller: socket.socket) -> NoReturn:
    """Have a child do what a caller asks for, and tell the caller how it ended; it is killed when the caller is."""
    request, streams, _, _ = socket.recv_fds(caller, _REQUEST, 3)
    child = os.fork()
    if not child:
        os.close(caller.detach())
        _command(json.loads(request), streams)
    for stream in streams:
        os.close(stream)
    caller.sendall(str(child).encode())
    watched: list[Any] = [caller, os.pidfd_open(child)]
    if caller in select.select(watched, [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        caller.sendall(str(status).encode())
    os._exit(0)


def _command(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """What the console script does, with keepers that are forked from a process as young as this one."""
    from mla_conformance import cli
    from mla_conformance.engine import place

    connection, remote = socket.socketpair()
    if not os.fork():
        connection.close()
        for stream in streams:
            os.close(stream)
        while _fork_keeper(remote):
            pass
        os._exit(0)
    remote.close()
    _become(request["environment"], request["folder"], *streams)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    for signal_number in _SIGNALS:
        heeded = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
        signal.signal(signal_number, heeded if signal_number in request["heeded"] else signal.SIG_IGN)
    sys.argv = ["mla-conformance", *request["arguments"]]
    started_anew, variables = place.start_keeper, _read_at_import(os.environ)

    def start_keeper(descriptor: int, log: int, environment: Mapping[str, str]) -> Any:
        if _read_at_import(environment) != variables:
            return started_anew(descriptor, log, environment)
        return _ask_for_keeper(connection, descriptor, log, environment)

    place.start_keeper = start_keeper
    cli.command()


def _become(environment: Mapping[str, str], folder: str, *streams: int) -> None:
    """A process as ``Popen`` would have started it, with these standard streams, in a session of its own."""
    os.setsid()
    for number, source in enumerate(streams):
        os.dup2(source, number)
    for source in {*streams}:
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
