"""The process that draws inputs, and the judge's way to it."""

import pickle
import socket
from collections.abc import Callable
from typing import NoReturn

import torch

from mla_conformance.apart.packing import Arena, Unpacker, pack, whole
from mla_conformance.apart.shared import Shared, receive, send
from mla_conformance.cases.case import Case
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import build_problem


def serve(connection: socket.socket, shared: Shared) -> None:
    """Build the problem of each case that is asked for, until the other end is closed."""
    arena = Arena(shared)
    while frame := receive(connection):
        arena.sweep()
        case, device, salt = pickle.loads(frame)
        shared.use(device)
        send(connection, _built(case, device, salt, arena))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the judge and the kernel need it next


def _built(case: Case, device: torch.device, salt: str, arena: Arena) -> bytes:
    try:
        answer = ("problem", pack(build_problem(case, device, salt), arena, whole))
    except Exception as error:
        return pickle.dumps(("error", error, []))
    openers, arena.openers = arena.openers, []
    return pickle.dumps((*answer, openers))


class Maker:
    """Has problems built by the other process.

    Args:
        connection: to it.
        shared: the memory.
        ended: what is done when that process has ended.
    """

    def __init__(self, connection: socket.socket, shared: Shared, ended: Callable[[], NoReturn]) -> None:
        self._connection, self._shared, self._ended = connection, shared, ended

    def use(self, device: torch.device) -> None:
        """The device that problems are built on."""
        self._shared.use(device)

    def build(self, case: Case, device: torch.device, salt: str) -> Problem:
        """As :func:`build_problem`, in tensors of this process.

        Raises:
            Exception: what building it raised.
        """
        try:
            send(self._connection, pickle.dumps((case, device, salt)))
            frame = receive(self._connection)
        except OSError:
            frame = b""
        if not frame:
            self._ended()
        what, answer, openers = pickle.loads(frame)
        if what == "error":
            raise answer
        for opener in openers:
            self._shared.open_cuda(opener)
        problem: Problem = Unpacker(answer, self._shared, private=True).load()
        self._shared.synchronize()
        return problem
