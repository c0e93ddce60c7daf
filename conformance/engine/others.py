"""The processes beside a judge: one draws inputs, the other has the backends. Neither is forked from a used GPU."""

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
from mla_conformance.apart.judge_side import OtherHand
from mla_conformance.apart.shared import Shared
from mla_conformance.engine.limits import (
    close_descriptors,
    end_as,
    end_with_parent,
    hide_memory,
    leave,
    limit_memory,
    machine_memory,
    renounce_signals,
    renounce_tracing,
)

_STACK_SECONDS = 0.5
_MOST_STACKS = 2**16


@dataclass(frozen=True)
class Others:
    """What a judge has of them.

    Attributes:
        hand: has steps carried out by the one that has the backends.
        maker: has problems built by the other.
    """

    hand: OtherHand
    maker: maker.Maker

    def use(self, device: torch.device) -> None:
        """Where backends are judged."""
        self.hand.use(device)
        self.maker.use(device)

    @staticmethod
    def fork(memory: int | None, supervisor: socket.socket) -> "Others":
        """Start both.

        Args:
            memory: bytes that each may allocate; None without a limit.
            supervisor: is told the stacks of the kernel's process when this one is asked for its own.
        """
        # The memory between two processes must be there before they part, and no third one may have it.
        shared, (stacks, told) = Shared(machine_memory()), os.pipe()
        kernel, to_kernel = _fork(partial(_serve_kernel, shared, told), memory, told)
        os.close(told)
        signal.signal(signal.SIGUSR1, partial(_tell_stacks, kernel, stacks, supervisor))
        inputs = Shared(machine_memory())
        drawing, to_maker = _fork(partial(_serve_maker, inputs), memory)
        hide_memory()
        hand = OtherHand(to_kernel, shared, partial(end_as, kernel))
        return Others(hand, maker.Maker(to_maker, inputs, partial(end_as, drawing)))


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
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _serve_kernel(shared: Shared, stacks: int, connection: socket.socket) -> None:
    hide_memory(False)
    renounce_tracing()
    renounce_signals()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    kernel_side.serve(connection, shared)


def _serve_maker(shared: Shared, connection: socket.socket) -> None:
    hide_memory()
    maker.serve(connection, shared)


def _tell_stacks(kernel: int, stacks: int, supervisor: socket.socket, number: int, _: FrameType | None) -> None:
    """Where the kernel's process is, in lines that are no message."""
    os.kill(kernel, number)
    os.kill(kernel, signal.SIGCONT)
    if select.select([stacks], [], [], _STACK_SECONDS)[0]:
        lines = os.read(stacks, _MOST_STACKS).splitlines()
        supervisor.sendall(b"".join(b"kernel | " + line + b"\n" for line in lines))
