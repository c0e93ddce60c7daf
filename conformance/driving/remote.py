"""Steps carried out in another process: the executor that has them done, and the process that does them.

That process imports a backend, asks it and calls it; of a problem it knows what a backend is handed. What the judge
asks is pickled, since the other side trusts it; what is answered is checked, see ``reply.py``.
"""

import contextlib
import pickle
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch

from mla_conformance.driving.executor import Executor, StepResult, itself, run_step
from mla_conformance.driving.reply import LONGEST_REPLY, MalformedReply, Reader, Reply, Writer, decode, reply_of
from mla_conformance.driving.shared import Arena, FrameError, Shared, SharedRange, Unpacker, pack, receive, send
from mla_conformance.problems.memory import device_lost, storage_bytes

_MOST_SHARE = 8  # a process that holds more than this part of a GPU for what it hands over should be replaced
_MALFORMED = "malformed reply from the kernel process"


class Wanted(Enum):
    """What the judge wants to know of a step's value: its tensors, plain data, or that it is kept for later steps."""

    RETURNED = "returned"
    FACT = "fact"
    NOTHING = "nothing"


class KernelRequest(msgspec.Struct, frozen=True):
    number: int  # of the request; what the step makes is kept under it, unless it is a fact
    step: bytes
    wanted: Wanted
    released: list[int]  # numbers of what is kept for no later step
    openers: list[bytes]  # of pieces of the GPU's memory
    rooms: dict[str, SharedRange]  # what is free for the answer
    reached: list[SharedRange]  # places of what the step may write


class RemoteValue:
    """What a step left in the kernel's process, for as long as anything here refers to it."""

    def __init__(self, number: int, released: list[int]) -> None:
        self.number, self._released = number, released

    def __reduce__(self) -> tuple[Any, ...]:
        return kept, (self.number,)

    def __del__(self) -> None:
        self._released.append(self.number)


class RemoteExecutor(Executor):
    """Has steps carried out by the kernel's process.

    Args:
        ended: what is done when that process has ended.
        ends: descriptors that become readable when it ends; what it has started may hold the connection open.
    """

    def __init__(
        self, connection: socket.socket, shared: Shared, ended: Callable[[], NoReturn], ends: Sequence[int] = ()
    ) -> None:
        self._connection, self._arena, self._ended, self._ends = connection, Arena(shared), ended, ends
        self._number, self._released = 0, list[int]()
        self._lost, self._broken = False, ""

    @property
    def spent(self) -> bool:
        """Its GPU is lost, it answered what cannot be, or it holds much of a GPU for what is handed over."""
        pieces = self._arena.shared.pieces["cuda"]
        if self._lost or self._broken or len(pieces) < 2:
            return self._lost or bool(self._broken)
        total = torch.cuda.get_device_properties(self._arena.shared.device("cuda")).total_memory
        return _MOST_SHARE * sum(piece.size for piece in pieces) > total

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
        return self._lost

    def use(self, device: torch.device) -> None:
        """Tell the kernel's process where backends are judged."""
        self._arena.shared.use(device)
        self._arena.require(device.type, 1)
        send(self._connection, pickle.dumps(device))

    def begin(self) -> None:
        self._arena.sweep()

    def make_room(self) -> None:
        self.make(torch.cuda.empty_cache)

    def _asked(
        self, step: Callable[[], Any], wanted: Wanted, memory: Sequence[torch.Tensor] = ()
    ) -> tuple[StepResult, Reply]:
        """What became of a step, and the reply, whose fields are plain data of the right types."""
        self._number, shared = self._number + 1, self._arena.shared
        if not self._broken:
            packed, reached = pack(step, self._arena), list(map(self._arena.place_of, memory))
            openers, self._arena.openers = self._arena.openers, []
            released = [self._released.pop() for _ in range(len(self._released))]
            rooms = {kind: self._arena.room(kind) for kind, pieces in shared.pieces.items() if pieces}
            request = KernelRequest(self._number, packed, wanted, released, openers, rooms, reached)
            try:
                answer, here = b"", self._connection.fileno()
                with contextlib.suppress(OSError):
                    send(self._connection, pickle.dumps(request))
                    ready, _, _ = select.select([here, *self._ends], [], [])
                    answer = receive(self._connection, LONGEST_REPLY) if here in ready else b""
                # Where there is no answer, the kernel's process has ended.
                reply = decode(answer or self._ended(), request.number)
                if not reply.needs.keys() <= shared.pieces.keys():
                    raise MalformedReply(f"expected types of devices, got {sorted(reply.needs)}")
                for tensor, place in zip(memory, reached, strict=True):
                    storage_bytes(tensor).copy_(shared.bytes_of(place))
                returned = wanted is Wanted.RETURNED and not reply.error and not reply.needs
                value = Reader(shared, rooms, memory).value(reply) if returned else None
            except (MalformedReply, FrameError) as error:
                # Nothing that comes later is the answer to what is asked.
                self._broken = f"{_MALFORMED}: {error}"
            else:
                shared.synchronize()
                self._lost = self._lost or reply.lost
                is_kept = wanted is not Wanted.FACT and not reply.error
                left = RemoteValue(self._number, self._released) if is_kept else None
                said = reply.error, reply.traceback, reply.out_of_memory, reply.disturbed
                return StepResult(value, *said, left), reply
        return StepResult(error=self._broken), Reply(self._number)


_KEPT: dict[int, Any] = {}  # in the kernel's process, what steps made, by the number of their request


def kept(number: int) -> Any:
    return _KEPT[number]


def serve(connection: socket.socket, shared: Shared) -> None:
    """Hear where backends are judged, then carry out steps until the other end is closed."""
    if frame := receive(connection):
        device = pickle.loads(frame)
        shared.use(device)
        while frame := receive(connection):
            request: KernelRequest = pickle.loads(frame)
            for number in request.released:
                _KEPT.pop(number, None)
            for opener in request.openers:
                shared.open_cuda(opener)
            done = run_step(partial(_told, request, shared))
            reply = reply_of(request.number, done)
            if done.error:
                reply = msgspec.structs.replace(reply, lost=device_lost(device))
            else:
                reply = msgspec.structs.replace(done.value, disturbed=reply.disturbed)
            data = msgspec.json.encode(reply)
            if len(data) > LONGEST_REPLY:
                error = f"ValueError: an answer of {len(data)} bytes, at most {LONGEST_REPLY} are taken"
                data = msgspec.json.encode(reply_of(request.number, StepResult(error=error)))
            send(connection, data)


def _told(request: KernelRequest, shared: Shared) -> Reply:
    value = Unpacker(request.step, shared).load()()
    if request.wanted is Wanted.FACT:
        return Reply(request.number, fact=msgspec.Raw(msgspec.json.encode(value)))
    _KEPT[request.number] = value
    reply = Reply(request.number)
    if request.wanted is Wanted.RETURNED:
        reply = Writer(shared, request.rooms, request.reached).reported(request.number, value)
    shared.synchronize()
    return reply
