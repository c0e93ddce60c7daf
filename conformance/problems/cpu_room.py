"""Memory of a CPU between two zones that fault, and what a fault there tells: by whom it is found, where, and how.

The fault is noted, the zone is opened, first to be read and then to be written, and the instruction runs again.
"""

import ctypes
import mmap
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

ZONE = 2**21
"""Bytes before and behind that fault, as many as a GPU's driver maps at least."""
_MASK_BYTES, _WITH_INFO = 128, 4


@dataclass
class Zone:
    """Bytes that nobody may touch.

    Attributes:
        first: address of the first one.
        access: ``reads`` or ``writes``, once it was touched.
        at: the address that was.
    """

    first: int
    access: str = ""
    at: int = 0

    def protect(self, allowed: int = 0) -> None:
        """Let it be read or written, or neither."""
        if _libc.mprotect(ctypes.c_void_p(self.first), ctypes.c_size_t(ZONE), allowed):
            raise OSError(ctypes.get_errno(), "mprotect")

    def note(self, address: int) -> None:
        """Who reads may go on reading; who comes back to the same zone wants to write."""
        self.access, self.at = ("writes", self.at) if self.access else ("reads", address)
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE if self.access == "writes" else mmap.PROT_READ)


class CpuRoom(mmap.mmap):
    """At least ``size`` bytes between two zones that fault.

    Attributes:
        name: what lies in it.
        capacity: bytes of it, whole pages.
        zones: before and behind them.
    """

    name: str
    capacity: int
    zones: tuple[Zone, Zone]

    def __new__(cls, name: str, size: int) -> "CpuRoom":
        """A room that is mapped for as long as a tensor in it lives."""
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


class _Info(ctypes.Structure):
    """``siginfo_t`` of a fault."""

    _fields_ = (("number", ctypes.c_int), ("errno", ctypes.c_int), ("code", ctypes.c_int), ("address", ctypes.c_void_p))


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)


class _Action(ctypes.Structure):
    """``struct sigaction`` of Linux's C libraries."""

    _fields_ = (
        ("handler", _Handler),
        ("mask", ctypes.c_ubyte * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_rooms = WeakSet[CpuRoom]()


def _fault(number: int, info: Any, _: int) -> None:
    """Note which zone was touched; the process dies of any other fault, as it would without this."""
    address = info.contents.address or 0
    zone = next((z for room in list(_rooms) for z in room.zones if z.first <= address < z.first + ZONE), None)
    if zone is None:
        _libc.signal(number, None)
    else:
        zone.note(address)


_noting = _Action(_Handler(_fault), flags=_WITH_INFO)


@contextmanager
def noted_faults() -> Iterator[None]:
    """Have faults in the zones of all rooms noted."""
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
