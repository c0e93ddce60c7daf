"""Calls whose operands are moved, storage by storage: to where memory begins or ends, or to where earlier ones were."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded, Original, over, storage_bytes
from mla_conformance.problems.rooms import CpuRoom, CudaRoom, touched_rooms

ALIGNMENT = 16  # bytes that every operand's address is a multiple of
OUT = "out"
_POISON = 0xFF
_ROOM_TO_GROW = 8
_LEAST_ROOM = 2**16
_ASIDE = 2**12  # bytes before the operands of :class:`Buffers`: what touches them is not asked here


class Side(StrEnum):
    END = "end"
    BEGINNING = "beginning"


@dataclass(frozen=True)
class Fence:
    """Operands with one side at a page that faults."""

    side: Side
    only: str = ""  # the name of the operand that is moved; every one if it is empty

    def holds(self, name: str) -> bool:
        return self.only in ("", name)

    def place(self, name: str, source: torch.Tensor) -> "_Placed":
        """A copy of the bytes [n] uint8 of a storage."""
        size = source.numel()
        room = _room(name, source, size)
        start = (room.capacity - size) // ALIGNMENT * ALIGNMENT if self.side is Side.END else 0
        parts = ((0, start), (start + size, room.capacity - start - size))
        around = [room.part(at, count).fill_(_POISON) for at, count in parts if count]
        return _Placed(source, room.part(start, size).copy_(source), tuple(around))


@dataclass(frozen=True)
class Buffers:
    """What an engine keeps: an operand of a name has the same address in every call, as long as it fits."""

    _rooms: dict[str, CpuRoom | CudaRoom] = field(default_factory=dict)

    def holds(self, name: str) -> bool:
        return True

    def place(self, name: str, source: torch.Tensor) -> "_Placed":
        """A copy of the bytes of a storage, in a storage of as many, which lives as long as a tensor refers to it."""
        size = source.numel()
        if name not in self._rooms or self._rooms[name].capacity < _ASIDE + size:
            self._rooms[name] = _room(name, source, _ASIDE + max(_LEAST_ROOM, _ROOM_TO_GROW * size))
        return _Placed(source, self._rooms[name].part(_ASIDE, size).copy_(source), ())


def _room(name: str, source: torch.Tensor, size: int) -> CpuRoom | CudaRoom:
    return CudaRoom(size) if source.is_cuda else CpuRoom(name, size)


class _Placed(NamedTuple):
    """A storage's bytes as they were handed over and where they were moved, with the poison of the pages around."""

    source: torch.Tensor
    data: torch.Tensor
    around: tuple[torch.Tensor, ...]


class MovedCall:
    """A call whose reachable storages, and output tensor, lie elsewhere."""

    def __init__(self, place: Fence | Buffers, call: KernelCall, out: Guarded | None) -> None:
        self._placed: dict[str, _Placed] = {}
        moved: dict[int, torch.UntypedStorage] = {}
        for name, tensor in operands(call).items():
            storage, source = tensor.untyped_storage(), storage_bytes(tensor)
            if place.holds(name) and source.numel() and storage._cdata not in moved:
                self._placed[name] = place.place(name, source)
                moved[storage._cdata] = self._placed[name].data.untyped_storage()
        # What operands mean is no backend's to see, and stays where it is.
        original = Original(call, [getattr(call, name) for name in call.means])
        self.call = original.over(moved)
        self.out = out
        if out is not None and place.holds(OUT) and out.view.numel():
            placed = self._placed[OUT] = place.place(OUT, out.view.view(-1).view(torch.uint8))
            view = placed.data.view(out.view.dtype).view(out.view.shape)
            self.out = Guarded(view, storage_bytes(view), 0)

    def settle(self) -> Iterator[str]:
        for room in touched_rooms():  # an operand of an earlier call may lie in it
            before, behind = room.zones
            data = self._placed[room.name].data if room.name in self._placed else room.part(0, room.capacity)
            first, end = data.data_ptr(), data.data_ptr() + data.numel()
            if behind.access:
                yield f"{behind.access} byte {behind.at - end + 1} behind the end of {room.name}"
            if before.access:
                yield f"{before.access} byte {first - before.at} before the beginning of {room.name}"
        self.write_back()
        for name, placed in self._placed.items():
            if any(bool((poison != _POISON).any()) for poison in placed.around):
                yield f"writes beside {name}, on its page"

    def write_back(self) -> None:
        for placed in self._placed.values():
            placed.source.copy_(placed.data)

    def handed_back(self, value: Any, out: Guarded | None) -> Any:
        """What the call returned, of which the moved output tensor is the caller's own again."""
        if out is None or self.out is None or self.out is out:
            return value
        moved, view = self.out.view, out.view
        settled = list(value) if isinstance(value, tuple | list) else [value]
        for number, part in enumerate(settled):
            if type(part) is not torch.Tensor or part.device != moved.device:
                continue
            if part.untyped_storage()._cdata == moved.untyped_storage()._cdata:
                # The moved storage begins where the view does in the caller's own.
                before = view.storage_offset() * view.element_size() // part.element_size()
                settled[number] = over(view.untyped_storage(), part, before)
        return type(value)(settled) if isinstance(value, tuple | list) else settled[0]


def operands(call: KernelCall) -> dict[str, torch.Tensor]:
    """What a call hands over, by name; what it lets be written, without a name of its own, is its cache."""
    named = call.owned()
    known = {tensor.untyped_storage()._cdata for tensor in named.values()}
    others = [tensor for tensor in call.reached if tensor.untyped_storage()._cdata not in known]
    numbered = {f"cache {number}" if len(others) > 1 else "cache": x for number, x in enumerate(others)}
    return named | numbered
