"""The process between supervisor and worker: it has imported everything, forks workers, and outlives each of them.

A worker that dies, hangs or kills its parent costs one case; the next one is there at once. What a worker's backend has
started, in whatever session, is ended with it. The keeper itself never touches a device.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from mla_conformance.engine.limits import THREADS, adopt_orphans, end_children, end_with_parent, hide_memory
from mla_conformance.engine.messages import Ended, Setup, decode, encode, read_line
from mla_conformance.files.late_imports import refuse_written_since
from mla_conformance.files.places import forget_current_folder

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(descriptor: int, supervisor: int) -> None:
    """Keep a worker at the other end of a socket until the supervisor closes its own end."""
    for number in _HANDLED:  # a run that was started in the background ignores some
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _end)
    end_with_parent(supervisor, signal.SIGTERM)
    adopt_orphans()
    forget_current_folder()
    gc.disable()  # nothing of what is imported is garbage, and each look at it takes a tenth of a second
    from mla_conformance.engine.worker import load_all, serve  # torch, and everything that a case needs

    connection, keeper = socket.socket(fileno=descriptor), os.getpid()
    connection.set_inheritable(False)
    if not (told := read_line(connection)):
        return  # the command has ended without a run
    setup = decode(told, Setup)
    _heed(setup.variables)
    load_all(setup)
    gc.freeze()  # or each worker would look at it after all, and get a copy of it by that
    gc.enable()
    hide_memory()
    refuse_written_since(setup.began)
    while not _is_closed(connection):
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


def _heed(variables: Mapping[str, str]) -> None:
    """Do as variables of the environment say which torch may have been imported without."""
    from torch import set_num_threads

    os.environ.update(variables)
    if THREADS in variables:
        set_num_threads(int(variables[THREADS]))


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _end(*_: object) -> NoReturn:
    end_children(set())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
