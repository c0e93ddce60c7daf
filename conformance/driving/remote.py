"""Steps carried out in another process: the executor that has them done, the process that does them, and its answers.

That process imports a backend, asks it and calls it; of a problem it knows what a backend is handed. What the judge
asks is pickled, since the other side trusts it. What is answered is plain facts in JSON, and tensors that lie in memory
which both processes map. Nothing of it is believed: each field has its type and its limits, and each tensor is copied
before anything looks at it.
"""

import contextlib
import pickle
import select
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Annotated, Any, Literal, NoReturn

import msgspec
import torch
from msgspec import Meta

from mla_conformance.backends.foreign import type_name
from mla_conformance.driving import driver
from mla_conformance.driving.driver import Executor, Instead, Step, StepResult, parts_of, why_not_plain
from mla_conformance.driving.shared import RemoteValue, ReplyError, Shared, SharedRange, pack, receive, send, unpack
from mla_conformance.problems.memory import Snapshot, device_lost, differing, out_of_memory, storage_bytes, whole_memory

_MOST_SHARE = 8  # a process that holds more than this part of a GPU for what it hands over should be replaced
_MALFORMED = "malformed reply from the kernel process"
LONGEST_LINE, LONGEST_TEXT, LONGEST_REPLY = 2_000, 100_000, 2**22
_ALIGNMENT = 64  # of what is returned, as far as it had it

_Line = Annotated[str, Meta(max_length=LONGEST_LINE)]
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_Count = Annotated[int, Meta(ge=0, lt=2**48)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=16)]  # of so many dimensions


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    kind: _Line  # name of its type
    why: _Line = ""  # what it is instead of a tensor that can be looked at; empty if it is one
    is_tensor: bool = False  # whether it is a tensor of any kind
    dtype: _Line = ""
    shape: _Counts = ()
    strides: _Counts = ()
    # where its bytes are, from the first element to the last; None of a tensor without
    place: tuple[_Line, _Count, _Count, _Count] | None = None
    offset: _Count = 0  # bytes before its first element
    of: int | None = None  # number of the caller's storage that it is a view of, whose bytes are in their own place


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of a step, beside what a :class:`StepResult` says."""

    number: int  # of the request
    error: _Text = ""
    traceback: _Text = ""
    out_of_memory: bool = False
    disturbed: Annotated[tuple[_Text, ...], Meta(max_length=100)] = ()
    parts: Annotated[tuple[Part, ...], Meta(max_length=100)] = ()  # what a call returned
    several: bool = False  # whether that was a tuple or a list
    needs: dict[_Line, _Count] = {}  # bytes that the parts need, by type of device, where there was not so much room
    fact: msgspec.Raw = msgspec.Raw(b"null")  # plain data, as JSON
    lost: bool = False  # the GPU's context is lost


Rooms = Mapping[str, SharedRange]  # by type of device, what is free for an answer
Wanted = Literal["tensors", "fact", "nothing"]  # of a step: what it returned, plain data, or that it is kept for others


class KernelRequest(msgspec.Struct, frozen=True):
    number: int  # of the request; what the step makes is kept under it, unless it is a fact
    step: bytes
    wanted: Wanted
    released: list[int]  # numbers of what is kept for no later step
    openers: list[bytes]  # of pieces of the GPU's memory
    rooms: Rooms
    reached: list[SharedRange]  # places of what the step may write


@dataclass(eq=False, repr=False)
class RemoteExecutor(Executor):
    connection: socket.socket
    shared: Shared
    ended: Callable[[], NoReturn]  # what is done when that process has ended
    ends: Sequence[int] = ()  # become readable when it ends; what it has started may hold the connection open
    _number: int = field(default=0, init=False)
    _released: list[int] = field(default_factory=list, init=False)
    _lost: bool = field(default=False, init=False)
    _broken: str = field(default="", init=False)

    @property
    def spent(self) -> bool:
        if self._lost or self._broken or len(pieces := self.shared.pieces["cuda"]) < 2:
            return self._lost or bool(self._broken)
        return _MOST_SHARE * sum(piece.size for piece in pieces) > whole_memory(self.shared.devices["cuda"])

    def call(self, step: Step, reached: Iterable[torch.Tensor] = (), before: Snapshot | None = None) -> StepResult:
        """The copies of what came back, in memory of this process; what is reached is as the step left it."""
        memory = list({x.untyped_storage().data_ptr(): x for x in reached if x.numel()}.values())
        done, reply = self._asked(step, "tensors", memory, before)
        if not reply.needs:
            return done
        try:
            for kind, size in reply.needs.items():
                self.shared.room(kind, size)
        except MemoryError as error:
            return replace(done, error=f"MemoryError: {error}", out_of_memory=True)
        again, reply = self._asked(partial(driver.itself, done.kept), "tensors")
        if reply.needs:
            return replace(done, error=f"MemoryError: no room for a result of {reply.needs} bytes", out_of_memory=True)
        return replace(again, disturbed=done.disturbed)

    def query(self, question: Step, kind: Any = None) -> StepResult:
        done, reply = self._asked(question, "nothing" if kind is None else "fact")
        if done.error or kind is None:
            return replace(done, value=done.kept)
        try:
            return replace(done, value=msgspec.json.decode(reply.fact, type=kind))
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return replace(done, error=f"{_MALFORMED}: {error}")

    def lost(self, device: torch.device) -> bool:
        return self._lost

    def use(self, device: torch.device) -> None:
        self.shared.devices[device.type] = device
        self.shared.synchronize()
        self.shared.room(device.type, 1)
        send(self.connection, pickle.dumps(device))

    def begin(self) -> None:
        self.shared.sweep()

    def make_room(self) -> None:
        self.query(torch.cuda.empty_cache)

    def _asked(
        self, step: Step, wanted: Wanted, memory: Sequence[torch.Tensor] = (), before: Snapshot | None = None
    ) -> tuple[StepResult, Reply]:
        """What became of a step, and the reply, whose fields are plain data of the right types."""
        self._number, shared = self._number + 1, self.shared
        if self._broken:
            return StepResult(error=self._broken), Reply(self._number)
        packed, reached = pack(step, shared), list(map(shared.place_of, memory))
        openers, shared.openers = shared.openers, []
        released = [self._released.pop() for _ in range(len(self._released))]
        rooms = {kind: shared.room(kind) for kind, pieces in shared.pieces.items() if pieces}
        request = KernelRequest(self._number, packed, wanted, released, openers, rooms, reached)
        try:
            answer, here = b"", self.connection.fileno()
            with contextlib.suppress(OSError):
                send(self.connection, pickle.dumps(request))
                ready, _, _ = select.select([here, *self.ends], [], [])
                answer = receive(self.connection, LONGEST_REPLY) if here in ready else b""
            # Where there is no answer, the kernel's process has ended.
            reply = msgspec.json.decode(answer or self.ended(), type=Reply)
            if reply.number != self._number:
                raise ReplyError(f"expected the answer to request {self._number}, got that to {reply.number}")
            if not reply.needs.keys() <= shared.pieces.keys():
                raise ReplyError(f"expected types of devices, got {sorted(reply.needs)}")
            pairs = [(storage_bytes(own), shared.bytes_of(there)) for own, there in zip(memory, reached, strict=True)]
            for tensor, (own, there) in compress(zip(memory, pairs, strict=True), differing(pairs)):
                if before is not None:
                    before.keep([tensor])
                own.copy_(there)
            is_returned = wanted == "tensors" and not reply.error and not reply.needs
            value = returned(reply, shared, rooms, memory) if is_returned else None
        except (ReplyError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._broken = f"{_MALFORMED}: {error}"  # nothing that comes later is the answer to what is asked
            return StepResult(error=self._broken), Reply(self._number)
        shared.synchronize()
        self._lost = self._lost or reply.lost
        left = RemoteValue(self._number, self._released) if wanted != "fact" and not reply.error else None
        said = reply.error, reply.traceback, reply.out_of_memory, reply.disturbed
        return StepResult(value, *said, left), reply


def returned(reply: Reply, shared: Shared, rooms: Rooms, reached: Sequence[torch.Tensor]) -> Any:
    """Copies of what a call returned; where this process has no room, an OutOfMemoryError is not the kernel's fault."""
    parts: list[Any] = []
    try:
        for part in reply.parts:
            if part.why or not part.is_tensor:
                parts.append(Instead(part.kind, part.why or f"a {part.kind}", part.is_tensor))
                continue
            dtype = getattr(torch, part.dtype, None)
            if not isinstance(dtype, torch.dtype) or len(part.shape) != len(part.strides):
                raise ReplyError(f"expected a dtype and as many strides as sizes, got {part.dtype!r}")
            if part.place is None and part.of is None:
                parts.append(torch.empty_strided(part.shape, part.strides, dtype=dtype, device="meta"))
                continue
            if part.of is None:
                place = SharedRange(*part.place or ())
                room = rooms.get(place.kind)
                inside = room and place.piece == room.piece and room.at <= place.at
                if not room or not inside or place.at + place.size > room.at + room.size:
                    raise ReplyError("expected a tensor in the room for answers, got one elsewhere")
                storage = shared.bytes_of(place).clone().untyped_storage()
            elif 0 <= part.of < len(reached):
                storage = reached[part.of].untyped_storage()
            else:
                raise ReplyError(f"expected one of {len(reached)} storages, got number {part.of}")
            if part.offset % dtype.itemsize or part.offset + _span(part, dtype.itemsize) > storage.nbytes():
                raise ReplyError(f"expected a tensor within {storage.nbytes()} bytes, got one beyond")
            made = torch.empty(0, dtype=dtype, device=storage.device)
            parts.append(made.set_(storage, part.offset // dtype.itemsize, part.shape, part.strides))
    except (RuntimeError, TypeError) as error:
        if out_of_memory(error):
            raise
        raise ReplyError(f"no tensor can be made of it: {error}") from error
    if not reply.several and len(parts) != 1:
        raise ReplyError(f"expected one part, got {len(parts)}")
    return tuple(parts) if reply.several else parts[0]


def serve(connection: socket.socket, shared: Shared) -> None:
    """Hear where backends are judged, then carry out steps until the other end is closed."""
    kept: dict[int, Any] = {}  # what steps made, by the number of their request
    if frame := receive(connection):
        device = pickle.loads(frame)
        shared.devices[device.type] = device
        shared.synchronize()
        while frame := receive(connection):
            request: KernelRequest = pickle.loads(frame)
            for number in request.released:
                kept.pop(number, None)
            for opener in request.openers:
                shared.open_cuda(opener)
            done = driver.run_step(partial(_told, request, shared, kept))
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


def _told(request: KernelRequest, shared: Shared, kept: dict[int, Any]) -> Reply:
    value = unpack(request.step, shared, kept)()
    reply = Reply(request.number)
    if request.wanted == "fact":
        return msgspec.structs.replace(reply, fact=msgspec.Raw(msgspec.json.encode(value)))
    kept[request.number] = value
    if request.wanted == "tensors":
        reply = written(shared, request.rooms, request.reached, request.number, value)
    shared.synchronize()
    return reply


def written(shared: Shared, rooms: Rooms, reached: Sequence[SharedRange], number: int, value: Any) -> Reply:
    """What a call returned, put into the rooms for it by the kernel's process, unless it is part of ``reached``."""
    parts: list[Part] = []
    needs: dict[str, int] = {}  # bytes, by type of device
    for each in parts_of(value):
        kind = type_name(each)[:LONGEST_LINE]
        if why := why_not_plain(each):
            parts.append(Part(kind, why[:LONGEST_LINE], issubclass(type(each), torch.Tensor)))
            continue
        part = Part(kind, "", True, str(each.dtype).removeprefix("torch."), tuple(each.shape), each.stride())
        device, item = each.device.type, each.element_size()
        if each.is_meta:
            parts.append(part)
            continue
        if each.device != shared.devices.get(device):
            parts.append(Part(kind, f"a tensor on {each.device}", True))
            continue
        first, begin = each.storage_offset() * item, each.untyped_storage().data_ptr()
        here = [index for index, x in enumerate(reached) if x.size and x.kind == device]
        if own := [index for index in here if begin == shared.address_of(reached[index])]:
            parts.append(msgspec.structs.replace(part, offset=first, of=own[0]))
            continue
        size = _span(part, item)  # from the first element to the last, as far behind an aligned address as they are
        lead = each.data_ptr() % _ALIGNMENT if size else 0
        lead -= lead % item
        room, taken = rooms[device], needs.get(device, 0)
        needs[device] = taken + -(-(lead + size) // _ALIGNMENT) * _ALIGNMENT
        place = SharedRange(room.kind, room.piece, room.at + taken, lead + size)
        if taken + lead + size <= room.size and size:
            shared.bytes_of(place)[lead:].copy_(storage_bytes(each)[first : first + size])
        parts.append(msgspec.structs.replace(part, place=tuple(place), offset=lead))
    if any(need > rooms[kind].size for kind, need in needs.items()):
        return Reply(number, needs=needs)
    return Reply(number, parts=tuple(parts), several=issubclass(type(value), tuple | list))


def reply_of(number: int, done: StepResult) -> Reply:
    error, traceback, *disturbed = (
        text[-LONGEST_TEXT // 8 :].encode("utf-8", "backslashreplace").decode("utf-8")
        for text in (done.error, done.traceback, *done.disturbed)
    )
    return Reply(number, error, traceback, done.out_of_memory, tuple(disturbed))


def _span(part: Part, item: int) -> int:
    if 0 in part.shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))) * item
