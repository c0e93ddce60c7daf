"""Calls whose operands are moved, to where memory begins or ends, beside zones that fault, or to where others were.

On a CPU a fault tells where it was, and how. On a GPU the zones are addresses that are reserved and not mapped (CUDA
driver API, "Virtual Memory Management").
"""

import ctypes
import mmap
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from mla_conformance.problems import calls, memory

ZONE = 2**21  # bytes before and behind that fault, as many as a GPU's driver maps at least
_MASK_BYTES, _WITH_INFO = 128, 4


@dataclass
class Zone:
    first: int  # address of the first of its bytes, which nobody may touch
    access: str = ""  # ``reads`` or ``writes``, once it was touched
    at: int = 0  # the address that was

    def protect(self, allowed: int = 0) -> None:
        if _libc.mprotect(ctypes.c_void_p(self.first), ctypes.c_size_t(ZONE), allowed):
            raise OSError(ctypes.get_errno(), "mprotect")


class CpuRoom(mmap.mmap):
    """Bytes between two zones that fault, mapped for as long as a tensor in them lives."""

    name: str  # what lies in it
    capacity: int  # bytes of it, whole pages
    zones: tuple[Zone, Zone]  # before and behind them

    def __new__(cls, name: str, size: int) -> "CpuRoom":
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        room = super().__new__(cls, -1, whole + 2 * ZONE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.name, room.capacity = name, whole
        inside = room.part(0, 1).data_ptr()
        room.zones = Zone(inside - ZONE), Zone(inside + whole)
        for zone in room.zones:
            zone.protect()
        _rooms.add(room)
        return room

    def part(self, offset: int, length: int) -> torch.Tensor:
        """The bytes from an offset on, so many, as a uint8 tensor with a storage of its own."""
        return torch.frombuffer(self, dtype=torch.uint8, count=length, offset=ZONE + offset)


def _structure(**fields: Any) -> Any:
    return type("_Structure", (ctypes.Structure,), {"_fields_": tuple(fields.items())})


# ``siginfo_t`` of a fault and ``struct sigaction`` of Linux's C libraries; of ``cuda.h`` ``CUmemLocation``,
# ``CUmemAllocationProp`` and ``CUmemAccessDesc``.
_Info = _structure(number=ctypes.c_int, errno=ctypes.c_int, code=ctypes.c_int, address=ctypes.c_void_p)
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)
_Action = _structure(handler=_Handler, mask=ctypes.c_ubyte * _MASK_BYTES, flags=ctypes.c_int, restorer=ctypes.c_void_p)
_Location = _structure(type=ctypes.c_int, id=ctypes.c_int)
_Properties = _structure(
    type=ctypes.c_int, handle_types=ctypes.c_int, location=_Location, win32=ctypes.c_void_p, flags=ctypes.c_ubyte * 8
)
_Access = _structure(location=_Location, flags=ctypes.c_int)
_libc = ctypes.CDLL(None, use_errno=True)
_rooms = WeakSet[CpuRoom]()


def _fault(number: int, info: Any, _: int) -> None:
    """Note which zone was touched; the process dies of any other fault, as it would without this."""
    address = info.contents.address or 0
    zone = next((z for room in list(_rooms) for z in room.zones if z.first <= address < z.first + ZONE), None)
    if zone is None:
        _libc.signal(number, None)
        return
    # The zone is opened, first to be read and then to be written; the instruction that faulted runs again.
    zone.access, zone.at = ("writes", zone.at) if zone.access else ("reads", address)
    zone.protect(mmap.PROT_READ | mmap.PROT_WRITE if zone.access == "writes" else mmap.PROT_READ)


_noting = _Action(_Handler(_fault), flags=_WITH_INFO)


@contextmanager
def noted_faults() -> Iterator[None]:
    before = _Action()
    _libc.sigaction(signal.SIGSEGV, ctypes.byref(_noting), ctypes.byref(before))
    try:
        yield
    finally:
        _libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)


def touched_rooms() -> Iterator[CpuRoom]:
    """The rooms beside which something was touched since this was last asked; their zones stay as they are."""
    for room in [room for room in _rooms if any(zone.access for zone in room.zones)]:
        _rooms.discard(room)
        yield room


_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_OUT_OF_MEMORY = 2


class CudaRoom:
    """At least ``size`` bytes of the current GPU, whole granules with an unmapped one on either side."""

    capacity: int  # bytes of it

    def __init__(self, size: int) -> None:
        location = _Location(_ON_DEVICE, torch.cuda.current_device())
        properties, granule = _Properties(type=_PINNED, location=location), ctypes.c_size_t()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(properties), _MINIMUM)
        guard = granule.value
        self.capacity = max(1, -(-size // guard)) * guard
        reserved, handle = ctypes.c_uint64(), ctypes.c_uint64()
        whole, held = ctypes.c_size_t(self.capacity + 2 * guard), ctypes.c_size_t(self.capacity)
        none = ctypes.c_size_t(0)
        _driver("cuMemAddressReserve", ctypes.byref(reserved), whole, none, ctypes.c_uint64(0), ctypes.c_uint64(0))
        _driver("cuMemCreate", ctypes.byref(handle), held, ctypes.byref(properties), ctypes.c_uint64(0))
        self.address = reserved.value + guard
        inside = ctypes.c_uint64(self.address)
        _driver("cuMemMap", inside, held, none, handle, ctypes.c_uint64(0))
        access = _Access(location, _READ_WRITE)
        _driver("cuMemSetAccess", inside, held, ctypes.byref(access), ctypes.c_size_t(1))
        weakref.finalize(self, _give_back, inside, held, handle, reserved, whole)

    def part(self, offset: int, length: int) -> torch.Tensor:
        interface = {"shape": (length,), "typestr": "|u1", "data": (self.address + offset, False), "version": 3}
        # What torch takes memory from that is not its own; it keeps this object for as long as the tensor lives.
        return torch.as_tensor(SimpleNamespace(room=self, __cuda_array_interface__=interface), device="cuda")


def _give_back(inside: Any, held: Any, handle: Any, reserved: Any, whole: Any) -> None:
    library = _library()  # which refuses all calls after a fault
    library.cuCtxSynchronize()
    library.cuMemUnmap(inside, held)
    library.cuMemRelease(handle)
    library.cuMemAddressFree(reserved, whole)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        error = MemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name} returned CUresult {status}")


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
class Fence:  # operands with one side at a page that faults
    side: Side
    only: str = ""  # the name of the operand that is moved; every one if it is empty

    def place(self, name: str, source: torch.Tensor) -> "_Placed":
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

    only: ClassVar[str] = ""

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

    def __init__(self, place: Fence | Buffers, call: calls.KernelCall, out: memory.Guarded | None) -> None:
        self._placed: dict[str, _Placed] = {}
        moved: dict[int, torch.UntypedStorage] = {}
        for name, tensor in operands(call).items():
            storage, source = tensor.untyped_storage(), memory.storage_bytes(tensor)
            if place.only in ("", name) and source.numel() and storage._cdata not in moved:
                self._placed[name] = place.place(name, source)
                moved[storage._cdata] = self._placed[name].data.untyped_storage()
        # What operands mean is no backend's to see, and stays where it is.
        original = memory.Original(call, [getattr(call, name) for name in call.means])
        self.call = original.over(moved)
        self.out = out
        if out is not None and place.only in ("", OUT) and out.view.numel():
            placed = self._placed[OUT] = place.place(OUT, out.view.view(-1).view(torch.uint8))
            view = placed.data.view(out.view.dtype).view(out.view.shape)
            self.out = memory.Guarded(view, memory.storage_bytes(view), 0)

    def settle(self) -> Iterator[str]:
        for room in touched_rooms():  # an operand of an earlier call may lie in it
            before, behind = room.zones
            data = self._placed[room.name].data if room.name in self._placed else room.part(0, room.capacity)
            first, end = data.data_ptr(), data.data_ptr() + data.numel()
            if behind.access:
                yield f"{behind.access} byte {behind.at - end + 1} behind the end of {room.name}"
            if before.access:
                yield f"{before.access} byte {first - before.at} before the beginning of {room.name}"
        for name, placed in self._placed.items():
            if any(bool((poison != _POISON).any()) for poison in placed.around):
                yield f"writes beside {name}, on its page"

    def write_back(self) -> None:
        for placed in self._placed.values():
            placed.source.copy_(placed.data)

    def handed_back(self, value: Any, out: memory.Guarded | None) -> Any:
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
                settled[number] = memory.over(view.untyped_storage(), part, before)
        return type(value)(settled) if isinstance(value, tuple | list) else settled[0]


def operands(call: calls.KernelCall) -> dict[str, torch.Tensor]:
    """What a call hands over, by name; what it lets be written, without a name of its own, is its cache."""
    named = call.owned()
    known = {tensor.untyped_storage()._cdata for tensor in named.values()}
    others = [tensor for tensor in call.reached if tensor.untyped_storage()._cdata not in known]
    numbered = {f"cache {number}" if len(others) > 1 else "cache": x for number, x in enumerate(others)}
    return named | numbered
