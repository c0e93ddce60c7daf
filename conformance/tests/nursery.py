"""Processes of tests, forked from one process that has imported everything: an import takes 3 s of CPU time.

A module of the engine is what :func:`mla_conformance.engine.keeper.start_module` starts, and does the same: it is a
child of the process that asks. A command is a script that stands for the console script, for tests of what commands do
one after another, in scripts and pages; another script stands for Python, for pytest and its workers above all. Tests
of how a process starts, of what it imports and of signals run Python and the console script themselves.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_REQUEST = 2**20
_AT_IMPORT = ("PYTHON", "OMP_", "MKL_", "LC_", "LANG", "LD_")
"""Beginnings of the names of variables that are read when Python or a library starts."""
_OTHERWISE = 'not sys.argv[1:] or (sys.argv[1][0] == "-" and sys.argv[1] not in ("-P", "-u", "-c", "-m"))'
"""Arguments of Python that are not taken over."""
_SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
variables = {{name: value for name, value in os.environ.items() if name.startswith({at_import})}}
if variables != {variables} or {otherwise}:  # it would start otherwise than what is forked
    os.execv({program!r}, [{program!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\\0{address}")
heeded = [number for number in {signals} if signal.getsignal(number) != signal.SIG_IGN]
request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "heeded": heeded}}
request |= {{"program": {program!r}, "python": {stands_for_python!r}}}
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
UNEXPLAINED = "MLA_TESTS_UNEXPLAINED"
"""A variable of programs that compare no failure with all that is known, which takes seconds."""
_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Forked(subprocess.Popen[bytes]):
    """A module of the engine that was forked elsewhere, and of which this process has become the parent."""

    def __init__(self, pid: int) -> None:
        self.args, self.pid, self.returncode = "module", pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


class Nursery:
    def __init__(self) -> None:
        self._socket, remote = socket.socketpair()
        self._address = f"mla-conformance-{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{self._address}")  # no file, so that nothing is left of it
        listener.listen()
        descriptors = [remote.fileno(), listener.fileno()]
        command = [sys.executable, "-P", "-m", __name__, *map(str, descriptors)]
        self._process = subprocess.Popen(command, pass_fds=descriptors, start_new_session=True)
        remote.close()
        listener.close()
        _fork_modules(self._socket)

    def write_scripts(self, folder: Path) -> None:
        """One that does as the console script, and one that does as Python, in a forked process."""
        for name, otherwise in (("mla-conformance", "False"), ("python", _OTHERWISE)):
            text = _SCRIPT.format(
                python=sys.executable, at_import=_AT_IMPORT, variables=_read_at_import(os.environ), otherwise=otherwise,
                program=str(Path(sys.executable).with_name(name)), stands_for_python=str(folder / "python"),
                address=self._address, signals=_SIGNALS,
            )  # fmt: skip
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o755)

    def end(self) -> None:
        self._socket.close()
        self._process.terminate()  # it may not be needed yet, and still import
        self._process.wait()


def _fork_modules(connection: socket.socket) -> None:
    """Have modules of the engine forked at the other end, unless variables are other than they are now."""
    from mla_conformance.engine import keeper

    started_anew, variables = keeper.start_module, _read_at_import(os.environ)
    prctl, adopted = ctypes.CDLL(None).prctl, ctypes.c_int()

    def start_module(name: str, env: Mapping[str, str] | None = None, **streams: Any) -> Any:
        environment = os.environ if env is None else env
        if _read_at_import(environment) != variables:
            return started_anew(name, env=env, **streams)
        request = {"module": name, "environment": dict(environment), "folder": str(Path.cwd()), "asks": os.getpid()}
        own, remote = socket.socketpair()
        with Path(os.devnull).open("w") as nowhere, remote:
            given = [streams.get("stdout") or 1, streams.get("stderr") or 2]
            printed = [nowhere if each == subprocess.DEVNULL else each for each in given]
            numbers = [each if isinstance(each, int) else each.fileno() for each in printed]
            prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopted))
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # it is an orphan, of which this process becomes the parent
            socket.send_fds(connection, [json.dumps(request).encode()], [remote.fileno(), *numbers])
            forked = Forked(int(connection.recv(32)))
            prctl(_PR_SET_CHILD_SUBREAPER, adopted.value)
        return forked, own

    vars(keeper)["start_module"] = start_module


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_AT_IMPORT)}


def main(descriptor: int, listening: int) -> None:
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
        elif not _fork_module(connection):
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _fork_module(connection: socket.socket) -> bool:
    """Fork what is asked for; whether anything was."""
    request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST, 3)
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
        while os.getppid() not in (1, asked["asks"]):
            time.sleep(0.001)
        _become(asked["environment"], asked["folder"], os.open(os.devnull, os.O_RDONLY), *descriptors[1:])
        _serve(import_module(asked["module"]), descriptors[0], asked["asks"])
    os.waitpid(between, 0)
    connection.sendall(os.read(told, 32))
    for number in (told, tell, *descriptors):
        os.close(number)
    return True


def _serve(module: Any, descriptor: int, parent: int) -> NoReturn:
    from mla_conformance.engine import beside, keeper, machine

    if module is keeper:
        module.main(descriptor, parent)
    else:
        if module is beside:  # which has keepers
            _fork_modules(_nursery_of_its_own())
            machine.end_with_parent(parent, signal.SIGTERM)
        module.main(socket.socket(fileno=descriptor))
    os._exit(0)


def _nursery_of_its_own(*inherited: int) -> socket.socket:
    """The connection to a child as young as this process, which forks modules and holds nothing ``inherited``."""
    connection, remote = socket.socketpair()
    if not os.fork():
        connection.close()
        for number in inherited:
            os.close(number)
        while _fork_module(remote):
            pass
        os._exit(0)
    remote.close()
    return connection


def _carry_out(caller: socket.socket) -> NoReturn:
    """Have a child do what a caller asks for, and tell the caller how it ended; it is killed when the caller is."""
    request, streams, _, _ = socket.recv_fds(caller, _REQUEST, 3)
    child = os.fork()
    if not child:
        os.close(caller.detach())
        _run(json.loads(request), streams)
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


def _run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """What the program does, where modules of the engine, and Python, are forked from a process as young as this."""
    from mla_conformance import cli
    from mla_conformance.engine import explainer
    from mla_conformance.engine import run as running

    connection = _nursery_of_its_own(*streams)
    _become(request["environment"], request["folder"], *streams)
    _fork_modules(connection)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    for signal_number in _SIGNALS:
        heeded = signal.default_int_handler if signal_number == signal.SIGINT else signal.SIG_DFL
        signal.signal(signal_number, heeded if signal_number in request["heeded"] else signal.SIG_IGN)
    if UNEXPLAINED in os.environ:
        running.MOST_EXPLAINED = 0
        explainer.Explainer.explain = lambda *_: ""  # type: ignore[method-assign]
    sys.argv, sys.executable = [request["program"], *request["arguments"]], request["python"]
    if not request["program"].endswith("python"):
        cli.command()
    try:
        status = _python(request["arguments"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    cli.leave(status)


def _python(arguments: list[str]) -> int:
    """What Python does with arguments, but that it has imported the suite, unless it is to know of no folder."""
    options = set[str]()
    while arguments[0] in ("-P", "-u"):
        options.add(arguments.pop(0))
    what, *sys.argv = arguments if arguments[0] in ("-c", "-m") else ["", *arguments]
    if "-P" in options:
        for name in [each for each in sys.modules if each.partition(".")[0] == "mla_conformance"]:
            del sys.modules[name]
    else:
        sys.path.insert(0, str(Path.cwd() if what else Path(sys.argv[0]).parent.absolute()))
    if what == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif what:
        code, sys.argv[0] = sys.argv[0], what
        sys.modules["__main__"] = ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


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
