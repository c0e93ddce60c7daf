"""The process between supervisor and worker: it has imported everything, forks workers, and outlives each of them.

A worker that dies, hangs or kills its parent costs one case, and what its backend has started is ended with it. The
first keeper of a run starts before the command itself is imported: only Python's own modules are imported here at once.
"""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

_JUDGING = ("certify", "replay", "watch")  # most of their runs need the process; one that does not ends it as well
Started = tuple["subprocess.Popen[bytes]", socket.socket]  # a module's process, and what leads there
begun: list[tuple[Started, tuple[int, int]]] = []
"""A keeper that waits for the first run that asks, and both ends of the pipe that it prints to."""


def begin(arguments: Sequence[str]) -> None:
    if arguments and arguments[0] in _JUDGING and {"-h", "--help"}.isdisjoint(arguments):
        log = os.pipe()
        begun.append((start_module(__name__, stdout=log[1], stderr=log[1]), log))


def start_module(name: str, **options: Any) -> Started:
    """A module of the engine as a process that is told its parent; Ctrl-C is the parent's."""
    connection, remote = socket.socketpair()
    with remote:
        command = [sys.executable, "-P", "-m", name, str(remote.fileno()), str(os.getpid())]
        own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "pass_fds": [remote.fileno()], "start_new_session": True}
        return subprocess.Popen(command, **own, **options), connection


def end_of_process(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(descriptor: int, supervisor: int) -> None:
    from mla_conformance.engine.machine import ADOPTS_ORPHANS, DUMPABLE, THREADS, end_children, end_with_parent, prctl
    from mla_conformance.engine.messages import Ended, Setup, decode, encode, read_line
    from mla_conformance.files.places import forget_current_folder, refuse_written_since

    def end(*_: object) -> NoReturn:
        end_children(set())
        os._exit(0)

    # A run that was started in the background ignores some.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, end)
    end_with_parent(supervisor, signal.SIGTERM)
    prctl(ADOPTS_ORPHANS, 1)
    forget_current_folder()
    gc.disable()  # nothing of what is imported is garbage, and each look at it takes a tenth of a second
    from torch import set_num_threads

    from mla_conformance.engine.worker import load_all, serve  # everything that a case needs

    connection, keeper = socket.socket(fileno=descriptor), os.getpid()
    connection.set_inheritable(False)
    if not (told := read_line(connection)):
        return  # the command has ended without a run
    setup = decode(told, Setup)
    os.environ.update(setup.variables)
    if THREADS in setup.variables:  # which torch may have been imported without
        set_num_threads(int(setup.variables[THREADS]))
    load_all(setup)
    gc.freeze()  # or each worker would look at it after all, and get a copy of it by that
    gc.enable()
    prctl(DUMPABLE, 0)
    refuse_written_since(setup.began)
    while True:
        with contextlib.suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return
        worker = os.fork()
        if not worker:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            end_with_parent(keeper, signal.SIGKILL)
            serve(connection, setup)
        _, status = os.waitpid(worker, 0)
        end_children(set())
        with contextlib.suppress(OSError):  # the supervisor has closed its end
            # A line of its own: the worker may have died in the middle of one.
            connection.sendall(b"\n" + encode(Ended(os.waitstatus_to_exitcode(status))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
