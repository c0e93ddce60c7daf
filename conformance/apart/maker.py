"""The process that draws inputs, and the judge's way to it."""

import contextlib
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


Asked = tuple[Case, torch.device, str]
"""What a problem is built of: case, device, salt."""


class Maker:
    """Has problems built by the other process.

    Args:
        connection: to it.
        shared: the memory.
        ended: what is done when that process has ended.

    Attributes:
        ahead: whose problem will be asked for next, so that it is built while the one before is judged; None where
            nobody knows, or where there is no memory for both.
    """

    def __init__(self, connection: socket.socket, shared: Shared, ended: Callable[[], NoReturn]) -> None:
        self._connection, self._shared, self._ended = connection, shared, ended
        self.ahead: Asked | None = None
        self._under_way: Asked | None = None
        self._built: tuple[Asked, Problem] | None = None

    def use(self, device: torch.device) -> None:
        """The device that problems are built on."""
        self._shared.use(device)

    def build(self, case: Case, device: torch.device, salt: str) -> Problem:
        """As :func:`build_problem`, in tensors of this process.

        Raises:
            Exception: what building it raised.
        """
        asked = (case, device, salt)
        self._collect()
        if self._built and self._built[0] == asked:
            (_, problem), self._built = self._built, None
        else:
            self._ask(asked)
            problem = self._received()
        if self.ahead:
            self._under_way, self.ahead, self._built = self.ahead, None, None
            self._ask(self._under_way)
        return problem

    def _collect(self) -> None:
        """Take what is under way; what went wrong with it goes wrong again where it is asked for."""
        if self._under_way:
            asked, self._under_way = self._under_way, None
            with contextlib.suppress(Exception):
                self._built = asked, self._received()

    def _ask(self, asked: Asked) -> None:
        with contextlib.suppress(OSError):  # it ended, which the receiver notices
            send(self._connection, pickle.dumps(asked))

    def _received(self) -> Problem:
        try:
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
