"""The process beside a judge that has the backends, and the operands that they are called with."""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import traceback
from functools import partial
from pathlib import Path
from types import FrameType

from mla_conformance.driving.loaded import LOADED
from mla_conformance.driving.remote import RemoteExecutor, serve
from mla_conformance.driving.shared import Shared
from mla_conformance.engine.limits import (
    LACKED_MEMORY,
    end_as,
    end_of,
    end_with_parent,
    hide_memory,
    leave,
    limit_memory,
    machine_memory,
    renounce_rights,
)
from mla_conformance.engine.messages import Setup
from mla_conformance.files.places import load_all_again, search_current_folder
from mla_conformance.problems.memory import out_of_memory

_STACK_SECONDS, _PIECE_SECONDS = 0.5, 0.05
_MOST_STACKS = 2**16
_STANDARD = 2


def start_kernel_process(setup: Setup, supervisor: socket.socket) -> RemoteExecutor:
    # The memory between two processes must be there before they part.
    shared, (stacks, reported), (mine, theirs) = Shared(machine_memory()), os.pipe(), socket.socketpair()
    judge, kernel = os.getpid(), os.fork()
    if not kernel:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_parent(judge, signal.SIGKILL)
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number > _STANDARD and number not in (theirs.fileno(), reported):
                with contextlib.suppress(OSError):  # the folder's own
                    os.close(number)
        if setup.memory:
            limit_memory(setup.memory)
        try:  # nothing that is raised may lead back into what the process that forked was doing
            load_all_again()
            LOADED.watch(setup.began)  # which trusts the folders of wheels that are searched so far
            search_current_folder()
            hide_memory(False)
            renounce_rights()
            faulthandler.register(signal.SIGUSR1, file=reported, all_threads=True)
            serve(theirs, shared)
        except BaseException as error:
            traceback.print_exc()
            leave(LACKED_MEMORY if out_of_memory(error) else 1)
        leave(0)
    theirs.close()
    os.close(reported)
    signal.signal(signal.SIGUSR1, partial(_print_stacks, kernel, stacks, supervisor))
    hide_memory()
    return RemoteExecutor(mine, shared, partial(end_as, kernel), end_of(kernel))


def _print_stacks(kernel: int, stacks: int, supervisor: socket.socket, number: int, _: FrameType | None) -> None:
    """Where the kernel's process is, in lines that are no message."""
    os.kill(kernel, number)
    os.kill(kernel, signal.SIGCONT)
    told, patience = b"", _STACK_SECONDS
    while len(told) < _MOST_STACKS and select.select([stacks], [], [], patience)[0]:
        told, patience = told + os.read(stacks, _MOST_STACKS), _PIECE_SECONDS
    supervisor.sendall(b"".join(b"kernel | " + line + b"\n" for line in told.splitlines()))
