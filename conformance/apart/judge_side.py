"""The executor of steps in another process: steps go there, answers come back and are checked."""

import pickle
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch

from mla_conformance.apart.kernel_side import KernelRequest, Wanted
from mla_conformance.apart.packing import Arena, RemoteValue, pack
from mla_conformance.apart.reply import LONGEST_REPLY, MalformedReply, Reader, Reply, decode
from mla_conformance.apart.shared import FrameError, Shared, receive, send
from mla_conformance.driving.executor import Executor, StepResult, itself
from mla_conformance.problems.memory import storage_bytes

_MALFORMED = "malformed reply from the kernel process"


class RemoteExecutor(Executor):
    """Has steps carried out by the kernel's process.

    Args:
        connection: to that process.
        shared: the memory.
        ended: what is done when that process has ended.
        ends: descriptors that become readable when it ends; what it has started may hold the connection open.

    Attributes:
        spent: whether it should be replaced: its GPU is lost, it answered what cannot be, or it holds much memory.
    """

    def __init__(
        self, connection: socket.socket, shared: Shared, ended: Callable[[], NoReturn], ends: Sequence[int] = ()
    ) -> None:
        self._connection, self._arena, self._ended, self._ends = connection, Arena(shared), ended, ends
        self._number, self._released = 0, list[int]()
        self._lost, self._broken = False, ""

    @property
    def spent(self) -> bool:
        """See above."""
        return self._lost or bool(self._broken) or self._arena.is_large

    def call(self, step: Callable[[], Any], reached: Iterable[torch.Tensor] = ()) -> StepResult:
        """The copies of what came back, in memory of this process; what is reached is as the step left it."""
        memory = list({x.untyped_storage().data_ptr(): x for x in reached if x.numel()}.values())
        done, reply = self._asked(step, Wanted.RETURNED, memory)
        if not reply.needs:
            return done
        try:
            for kind, size in reply.needs.items():
                self._arena.require(kind, size)
        except MemoryError as error:
            return replace(done, error=f"MemoryError: {error}", out_of_memory=True)
        again, reply = self._asked(partial(itself, done.kept), Wanted.RETURNED)
        if reply.needs:
            return replace(done, error=f"MemoryError: no room for a result of {reply.needs} bytes", out_of_memory=True)
        return replace(again, disturbed=done.disturbed)

    def make(self, step: Callable[[], Any]) -> StepResult:
        """A :class:`RemoteValue` for what the step made."""
        done, _ = self._asked(step, Wanted.NOTHING)
        return replace(done, value=done.kept)

    def query(self, question: Callable[[], Any], kind: Any) -> StepResult:
        """The answer, if it is data of this type."""
        done, reply = self._asked(question, Wanted.FACT)
        if done.error:
            return done
        try:
            return replace(done, value=msgspec.json.decode(reply.fact, type=kind))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return replace(done, error=f"{_MALFORMED}: {error}")

    def lost(self, device: torch.device) -> bool:
        """Whether the kernel's process said so."""
        return self._lost

    def use(self, device: torch.device) -> None:
        """Tell the kernel's process where backends are judged."""
        self._arena.shared.use(device)
        self._arena.require(device.type, 1)
        send(self._connection, pickle.dumps(device))

    def begin(self) -> None:
        """What was handed over earlier may be written over."""
        self._arena.sweep()

    def make_room(self) -> None:
        """Have the kernel's process give back what it only holds."""
        self.make(torch.cuda.empty_cache)

    def _asked(
        self, step: Callable[[], Any], wanted: Wanted, memory: Sequence[torch.Tensor] = ()
    ) -> tuple[StepResult, Reply]:
        """What became of a step, and the reply, whose fields are plain data of the right types."""
        self._number += 1
        if not self._broken:
            try:
                return self._answered(self._request(step, wanted, memory), memory)
            except (MalformedReply, FrameError) as error:
                # Nothing that comes later is the answer to what is asked.
                self._broken = f"{_MALFORMED}: {error}"
        return StepResult(error=self._broken), Reply(self._number)

    def _request(self, step: Callable[[], Any], wanted: Wanted, memory: Sequence[torch.Tensor]) -> KernelRequest:
        packed = pack(step, self._arena)
        reached = [self._arena.place_of(x) for x in memory]
        openers, self._arena.openers = self._arena.openers, []
        released = [self._released.pop() for _ in range(len(self._released))]
        return KernelRequest(self._number, packed, wanted, released, openers, self._arena.rooms(), reached)

    def _answered(self, request: KernelRequest, memory: Sequence[torch.Tensor]) -> tuple[StepResult, Reply]:
        shared = self._arena.shared
        reply = decode(self._sent(pickle.dumps(request)), request.number)
        if not reply.needs.keys() <= shared.pieces.keys():
            raise MalformedReply(f"expected types of devices, got {sorted(reply.needs)}")
        for tensor, place in zip(memory, request.reached, strict=True):
            storage_bytes(tensor).copy_(shared.bytes_of(place))
        returned = request.wanted is Wanted.RETURNED and not reply.error and not reply.needs
        value = Reader(shared, request.rooms, memory).value(reply) if returned else None
        shared.synchronize()
        self._lost = self._lost or reply.lost
        kept = RemoteValue(request.number, self._released) if request.keeps and not reply.error else None
        reported = (reply.error, reply.traceback, reply.out_of_memory, reply.disturbed)
        return StepResult(value, *reported, kept), reply

    def _sent(self, frame: bytes) -> bytes:
        """The answer to a frame; where there is none, the kernel's process has ended."""
        try:
            send(self._connection, frame)
            here = self._connection.fileno()
            ready, _, _ = select.select([here, *self._ends], [], [])
            answer = receive(self._connection, LONGEST_REPLY) if here in ready else b""
        except OSError:
            answer = b""
        return answer or self._ended()
