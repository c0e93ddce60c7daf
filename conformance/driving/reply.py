"""What the kernel's process answers: plain facts in JSON, and tensors that lie in memory which both processes map.

Nothing of an answer is believed: each field has its type and its limits, and each tensor is copied before anything
looks at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta

from mla_conformance.backends.foreign import type_name
from mla_conformance.driving.driver import Instead, parts_of, why_not_plain
from mla_conformance.driving.executor import StepResult
from mla_conformance.driving.shared import Shared, SharedRange
from mla_conformance.problems.memory import out_of_memory, storage_bytes

LONGEST_LINE, LONGEST_TEXT, LONGEST_REPLY = 2_000, 100_000, 2**22
_ALIGNMENT = 64
_MOST_DIMENSIONS = 16

_Line = Annotated[str, Meta(max_length=LONGEST_LINE)]
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_Count = Annotated[int, Meta(ge=0, lt=2**48)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=_MOST_DIMENSIONS)]


class MalformedReply(ValueError):
    """An answer that no unchanged process of a kernel gives."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One object that a call returned: a tensor, or why it is none that can be looked at."""

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
    # what a call returned; several if that was a tuple or a list
    parts: Annotated[tuple[Part, ...], Meta(max_length=100)] = ()
    several: bool = False
    needs: dict[_Line, _Count] = {}  # bytes that the parts need, by type of device, where there was not so much room
    fact: msgspec.Raw = msgspec.Raw(b"null")  # plain data, as JSON
    lost: bool = False  # the GPU's context is lost


@dataclass
class Writer:
    """Puts what a call returned into the rooms that are free for it, in the kernel's process."""

    shared: Shared
    rooms: dict[str, SharedRange]  # by type of device
    reached: list[SharedRange]  # places of the caller's storages, of which a part may be a view
    needs: dict[str, int] = field(default_factory=dict)  # bytes, by type of device

    def reported(self, number: int, value: Any) -> Reply:
        several = issubclass(type(value), tuple | list)
        parts = tuple(map(self._part, parts_of(value)))
        short = {kind: need for kind, need in self.needs.items() if need > self.rooms[kind].size}
        return Reply(number, needs=self.needs) if short else Reply(number, parts=parts, several=several)

    def _part(self, value: Any) -> Part:
        kind, is_tensor = type_name(value)[:LONGEST_LINE], issubclass(type(value), torch.Tensor)
        if why := why_not_plain(value):
            return Part(kind, why[:LONGEST_LINE], is_tensor)
        part = Part(kind, "", True, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.stride())
        if value.is_meta:
            return part
        if value.device != self.shared.device(value.device.type):
            return Part(kind, f"a tensor on {value.device}", True)
        begin, item = value.untyped_storage().data_ptr(), value.element_size()
        for index, place in enumerate(self.reached):
            if place.size and place.kind == value.device.type and begin == self.shared.storage(place).data_ptr():
                return msgspec.structs.replace(part, offset=value.storage_offset() * item, of=index)
        # The bytes from the first element to the last, as far behind an aligned address as they are.
        size = _span(part, item)
        lead = value.data_ptr() % _ALIGNMENT if size else 0
        lead -= lead % item
        room, taken = self.rooms[value.device.type], self.needs.get(value.device.type, 0)
        self.needs[value.device.type] = taken + -(-(lead + size) // _ALIGNMENT) * _ALIGNMENT
        place = SharedRange(room.kind, room.piece, room.at + taken, lead + size)
        if taken + lead + size <= room.size and size:
            first = value.storage_offset() * item
            self.shared.bytes_of(place)[lead:].copy_(storage_bytes(value)[first : first + size])
        return msgspec.structs.replace(part, place=tuple(place), offset=lead)


@dataclass
class Reader:
    """Takes what a call returned out of the rooms, in the judge's process: copies that nothing else can write."""

    shared: Shared
    rooms: dict[str, SharedRange]  # by type of device
    reached: Sequence[torch.Tensor]  # whose storages a part may be a view of

    def value(self, reply: Reply) -> Any:
        """What the call returned.

        Raises:
            MalformedReply: that cannot be.
            torch.OutOfMemoryError: this process has no room for a copy, which is not the kernel's fault.
        """
        try:
            parts = tuple(map(self._part, reply.parts))
        except (RuntimeError, TypeError) as error:
            if out_of_memory(error):
                raise
            raise MalformedReply(f"no tensor can be made of it: {error}") from error
        if not reply.several and len(parts) != 1:
            raise MalformedReply(f"expected one part, got {len(parts)}")
        return parts if reply.several else parts[0]

    def _part(self, part: Part) -> Any:
        if part.why or not part.is_tensor:
            return Instead(part.kind, part.why or f"a {part.kind}", part.is_tensor)
        dtype = getattr(torch, part.dtype, None)
        if not isinstance(dtype, torch.dtype) or len(part.shape) != len(part.strides):
            raise MalformedReply(f"expected a dtype and as many strides as sizes, got {part.dtype!r}")
        if part.place is None and part.of is None:
            return torch.empty_strided(part.shape, part.strides, dtype=dtype, device="meta")
        if part.of is None:
            place = SharedRange(*part.place or ())
            room = self.rooms.get(place.kind)
            inside = room and place.piece == room.piece and room.at <= place.at
            if not room or not inside or place.at + place.size > room.at + room.size:
                raise MalformedReply("expected a tensor in the room for answers, got one elsewhere")
            storage = self.shared.bytes_of(place).clone().untyped_storage()
        elif 0 <= part.of < len(self.reached):
            storage = self.reached[part.of].untyped_storage()
        else:
            raise MalformedReply(f"expected one of {len(self.reached)} storages, got number {part.of}")
        if part.offset % dtype.itemsize or part.offset + _span(part, dtype.itemsize) > storage.nbytes():
            raise MalformedReply(f"expected a tensor within {storage.nbytes()} bytes, got one beyond")
        made = torch.empty(0, dtype=dtype, device=storage.device)
        return made.set_(storage, part.offset // dtype.itemsize, part.shape, part.strides)


def reply_of(number: int, done: StepResult) -> Reply:
    """The reply to a step that raised, or whose value is told in another field."""

    def clean(text: str) -> str:
        return text[-LONGEST_TEXT // 8 :].encode("utf-8", "backslashreplace").decode("utf-8")

    return Reply(
        number, clean(done.error), clean(done.traceback), done.out_of_memory, tuple(map(clean, done.disturbed))
    )


def decode(data: bytes, number: int) -> Reply:
    try:
        reply = msgspec.json.decode(data, type=Reply)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise MalformedReply(str(error)) from error
    if reply.number != number:
        raise MalformedReply(f"expected the answer to request {number}, got that to {reply.number}")
    return reply


def _span(part: Part, item: int) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in part.shape:
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))) * item
