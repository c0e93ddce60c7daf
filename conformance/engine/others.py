"""The two processes beside a judge that judges apart: one draws inputs, the other has the backends."""

import faulthandler
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import NoReturn

import torch

from mla_conformance.apart import kernel_side, maker
from mla_conformance.apart.judge_side import RemoteExecutor
from mla_conformance.apart.shared import Shared
from mla_conformance.driving.loaded import LOADED
from mla_conformance.engine.limits import (
    LACKED_MEMORY,
    close_descriptors,
    end_as,
    end_of,
    end_with_parent,
    hide_memory,
    leave,
    limit_memory,
    machine_memory,
    renounce_signals_and_pipes,
    renounce_tracing,
)
from mla_conformance.engine.messages import Setup
from mla_conformance.files.places import search_current_folder
from mla_conformance.problems.memory import out_of_memory

_STACK_SECONDS = 0.5
_MOST_STACKS = 2**16


@dataclass(frozen=True)
class Others:
    """What a judge has of them.

    Attributes:
        executor: has steps carried out by the one that has the backends.
        maker: has problems built by the other.
    """

    executor: RemoteExecutor
    maker: maker.Maker

    def use(self, device: torch.device) -> None:
        """Where backends are judged."""
        self.executor.use(device)
        self.maker.use(device)

    @staticmethod
    def fork(setup: Setup, supervisor: socket.socket) -> "Others":
        """Start both.

        Args:
            setup: of this process.
            supervisor: is told the stacks of the kernel's process when this one is asked for its own.
        """
        # The memory between two processes must be there before they part, and no third one may have it.
        shared, (stacks, reported) = Shared(machine_memory()), os.pipe()
        kernel, to_kernel = _fork(partial(_serve_kernel, setup.began, shared, reported), setup.memory, reported)
        os.close(reported)
        signal.signal(signal.SIGUSR1, partial(_print_stacks, kernel, stacks, supervisor))
        inputs = Shared(machine_memory())
        drawing, to_maker = _fork(partial(_serve_maker, inputs), setup.memory)
        hide_memory()
        executor = RemoteExecutor(to_kernel, shared, partial(end_as, kernel), end_of(kernel))
        return Others(executor, maker.Maker(to_maker, inputs, partial(end_as, drawing)))


def _fork(serve: Callable[[socket.socket], None], memory: int | None, *spared: int) -> tuple[int, socket.socket]:
    """A new process that serves one end of a connection; its id, and the other end."""
    mine, theirs = socket.socketpair()
    judge = os.getpid()
    process = os.fork()
    if not process:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        end_with_parent(judge, signal.SIGKILL)
        close_descriptors({theirs.fileno(), *spared})
        if memory:
            limit_memory(memory)
        _serve(serve, theirs)
    theirs.close()
    return process, mine


def _serve(serve: Callable[[socket.socket], None], connection: socket.socket) -> NoReturn:
    """Nothing that is raised may lead back into what the process that forked was doing."""
    try:
        serve(connection)
    except BaseException as error:
        traceback.print_exc()
        leave(LACKED_MEMORY if out_of_memory(error) else 1)
    leave(0)


def open_to_backends(began: float) -> None:
    """Have this process import backends: from the current folder, too, and noting what it loads."""
    LOADED.watch(began)  # which trusts the folders of wheels that are searched so far
    search_current_folder()


def _serve_kernel(began: float, shared: Shared, stacks: int, connection: socket.socket) -> None:
    open_to_backends(began)
    hide_memory(False)
    renounce_tracing()
    renounce_signals_and_pipes()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    kernel_side.serve(connection, shared)


def _serve_maker(shared: Shared, connection: socket.socket) -> None:
    hide_memory()
    maker.serve(connection, shared)


def _print_stacks(kernel: int, stacks: int, supervisor: socket.socket, number: int, _: FrameType | None) -> None:
    """Where the kernel's process is, in lines that are no message."""
    os.kill(kernel, number)
    os.kill(kernel, signal.SIGCONT)
    if select.select([stacks], [], [], _STACK_SECONDS)[0]:
        lines = os.read(stacks, _MOST_STACKS).splitlines()
        supervisor.sendall(b"".join(b"kernel | " + line + b"\n" for line in lines))
