"""What two processes share: frames that they send, and memory that both map.

One piece of memory is the host's, from before they parted, others are a GPU's. Those are allocations of the driver, by
its own functions, each for the context that torch uses on the current device: torch's allocations hold other tensors as
well. A frame is eight bytes of length, and so many bytes.

Calls and problems are packed as bytes: tensors lie in that memory, the rest is pickled. What is unpacked was packed by
a process that is trusted. What the kernel's process answers is never unpickled; see ``reply.py``.
"""

import ctypes
import io
import mmap
import pickle
import socket
import struct
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_conformance.problems.cache_bytes import CacheImage
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem

HOST = "cpu"
_LENGTH = struct.Struct("<Q")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_NO_RESERVE = 0x4000  # Linux' MAP_NORESERVE: of a piece as large as the machine's memory, only what is used counts
_KEPT_BYTES = 2**28  # of the host's piece, what need not be given back


class SharedRange(NamedTuple):
    """Bytes that both processes know: of a device's type and of one of its pieces, the first and how many."""

    kind: str
    piece: int
    at: int
    size: int


class Piece(NamedTuple):
    address: int
    size: int


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class Shared:
    """What one of two processes sees of their memory; to be made before the other one is forked."""

    def __init__(self, host_bytes: int) -> None:
        self.map = mmap.mmap(-1, host_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.pieces: dict[str, list[Piece]] = {HOST: [Piece(address, host_bytes)], "cuda": []}
        self._device = torch.device(HOST)

    def use(self, device: torch.device) -> None:
        """The device that tensors which are not on the host are on."""
        self._device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.synchronize(device)

    def add_cuda(self, size: int) -> bytes:
        """One more piece of the GPU; what opens it in the other process."""
        driver, address, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), _Handle()
        if status := driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
            raise MemoryError(f"{size} bytes of a GPU that two processes share: the driver refused them ({status})")
        self.pieces["cuda"].append(Piece(address.value, size))
        _check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle) + size.to_bytes(8, "little")

    def open_cuda(self, opener: bytes) -> None:
        """One more piece, of the other process's."""
        driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        handle, flags = _Handle.from_buffer_copy(opener[:-8]), ctypes.c_uint(_LAZY_PEER_ACCESS)
        status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, flags)
        if status == _OUT_OF_MEMORY:
            raise MemoryError("no memory of the GPU is left to open what another process shares")
        _check("cuIpcOpenMemHandle", status)
        self.pieces["cuda"].append(Piece(address.value, int.from_bytes(opener[-8:], "little")))

    def storage(self, place: SharedRange) -> torch.UntypedStorage:
        device = self.device(place.kind)
        if not place.size:
            return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        address = self.pieces[place.kind][place.piece].address + place.at
        made: Any = torch._C._construct_storage_from_data_pointer(address, device, place.size)
        return made

    def bytes_of(self, place: SharedRange) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device(place.kind)).set_(self.storage(place))

    def device(self, kind: str) -> torch.device:
        return torch.device(HOST) if kind == HOST else self._device

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with {status}; --apart needs CUDA IPC between processes of this machine")


class FrameError(ValueError):
    """A frame that is longer than any may be."""


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(connection: socket.socket, limit: int | None = None) -> bytes:
    """One frame; empty if the other end is closed."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size) or bytes(_LENGTH.size))
    if limit is not None and length > limit:
        raise FrameError(f"expected at most {limit} bytes, got {length}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes; none if the other end is closed before they have come."""
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        more = connection.recv_into(view[got:])
        if not more:
            return b""
        got += more
    return bytes(data)


_ALIGNMENT = 512
_LEAST_PIECE = 2**28  # bytes of a GPU's memory that are asked for at once


class Arena:
    """Where what is handed over stands: each storage has a place of its own for as long as it lives."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.openers: list[bytes] = []  # of pieces that the other process has not been told of
        self._places: dict[int, tuple[StorageWeakRef, SharedRange]] = {}
        self._ends = {HOST: 0, "cuda": 0}

    def place_of(self, tensor: torch.Tensor) -> SharedRange:
        storage, kind = tensor.untyped_storage(), tensor.device.type
        found = self._places.get(storage._cdata)
        if found is None or found[0].expired():
            self.require(kind, size := storage.nbytes())
            room = self.room(kind)
            if size > room.size:
                raise MemoryError(f"{size} bytes between two processes, {room.size} are left")
            self._ends[kind] = room.at + size
            found = self._places[storage._cdata] = (StorageWeakRef(storage), room._replace(size=size))
        return found[1]

    def require(self, kind: str, size: int) -> None:
        if kind == "cuda" and self.room(kind).size < size:
            self.openers.append(self.shared.add_cuda(max(size + _ALIGNMENT, _LEAST_PIECE)))
            self._ends[kind] = 0

    def sweep(self) -> None:
        """Free what belongs to storages that are gone, up to the last that is not."""
        self._places = {key: found for key, found in self._places.items() if not found[0].expired()}
        ends = dict.fromkeys(self._ends, 0)
        for _, place in self._places.values():
            if place.piece == len(self.shared.pieces[place.kind]) - 1:
                ends[place.kind] = max(ends[place.kind], place.at + place.size)
        if not ends[HOST] and len(self.shared.map) > _KEPT_BYTES:
            self.shared.map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)  # let the system have most of the host's piece
        self._ends = ends

    def room(self, kind: str) -> SharedRange:
        """What is free, for an answer too."""
        pieces = self.shared.pieces[kind]
        if not pieces:
            return SharedRange(kind, 0, 0, 0)
        at = -(-self._ends[kind] // _ALIGNMENT) * _ALIGNMENT
        return SharedRange(kind, len(pieces) - 1, at, max(0, pieces[-1].size - at))


class _Packer(pickle.Pickler):
    arena: Arena
    written: set[SharedRange]

    def persistent_id(self, tensor: Any) -> Any:
        if type(tensor) is not torch.Tensor:
            return None
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.is_meta:
            return form
        place = self.arena.place_of(tensor)
        if place not in self.written:
            self.written.add(place)
            self.arena.shared.bytes_of(place).copy_(storage_bytes(tensor))
        return (*form, place, tensor.storage_offset())

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, KernelCall | Problem | CacheImage):
            return NotImplemented
        shown = value.handed()
        return NotImplemented if shown is value else shown.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def pack(value: Any, arena: Arena) -> bytes:
    """A value as bytes; calls and problems in it as a backend may know them."""
    packer = _Packer(file := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    packer.arena, packer.written = arena, set()
    packer.dump(value)
    arena.shared.synchronize()
    return file.getvalue()


class Unpacker(pickle.Unpickler):
    """Reads what another process packed; tensors stay in the memory that both have."""

    def __init__(self, data: bytes, shared: Shared) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared
        self._storages: dict[SharedRange, torch.UntypedStorage] = {}

    def persistent_load(self, reported: Any) -> torch.Tensor:
        dtype, shape, strides, *there = reported
        if not there:
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        place, offset = there
        storage = self._storages.setdefault(place, self._shared.storage(place))
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
