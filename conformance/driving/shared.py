"""What two processes share: frames that they send, and memory that both map.

One piece of memory is the host's, from before they parted; others are a GPU's, allocated by the driver's own functions,
since torch's allocations hold other tensors as well. What is unpacked comes from a process that is trusted; what the
kernel's process answers is never unpickled.
"""

import ctypes
import io
import mmap
import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_conformance.problems import calls, memory

_HANDED = (calls.KernelCall, calls.Problem, memory.Written)  # of which a backend may know only what ``handed`` leaves
_LENGTH = struct.Struct("<Q")
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_NO_RESERVE = 0x4000  # Linux' MAP_NORESERVE: of a piece as large as the machine's memory, only what is used counts
_KEPT_BYTES = 2**28  # of the host's piece, what need not be given back
_ALIGNMENT = 512
_LEAST_PIECE = 2**28  # bytes of a GPU's memory that are asked for at once, or half of what there is


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
    _fields_ = (("reserved", ctypes.c_char * 64),)


class Shared:
    """What one of two processes sees of their memory; to be made before the other one is forked."""

    def __init__(self, host_bytes: int) -> None:
        self.map = mmap.mmap(-1, host_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.pieces: dict[str, list[Piece]] = {"cpu": [Piece(address, host_bytes)], "cuda": []}
        self.devices = {"cpu": torch.device("cpu")}  # by their types; of a GPU once it is known which
        self.openers: list[bytes] = []  # of pieces that the other process has not been told of
        self._places: dict[int, tuple[StorageWeakRef, SharedRange]] = {}
        self._ends: dict[str, list[int]] = {"cpu": [0], "cuda": []}  # of each piece, behind what lives there

    def add_cuda(self, size: int) -> bytes:
        driver, address, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), _Handle()
        if status := driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
            raise MemoryError(f"{size} bytes of a GPU that two processes share: the driver refused them ({status})")
        self.pieces["cuda"].append(Piece(address.value, size))
        _check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(ctypes.byref(handle), address))
        return bytes(handle) + size.to_bytes(8, "little")

    def open_cuda(self, opener: bytes) -> None:
        driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        handle, flags = _Handle.from_buffer_copy(opener[:-8]), ctypes.c_uint(_LAZY_PEER_ACCESS)
        status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, flags)
        if status == _OUT_OF_MEMORY:
            raise MemoryError("no memory of the GPU is left to open what another process shares")
        _check("cuIpcOpenMemHandle", status)
        self.pieces["cuda"].append(Piece(address.value, int.from_bytes(opener[-8:], "little")))

    def address_of(self, place: SharedRange) -> int:
        return self.pieces[place.kind][place.piece].address + place.at

    def storage_of(self, place: SharedRange) -> torch.UntypedStorage:
        device = self.devices[place.kind]
        if not place.size:
            return torch.UntypedStorage(0, device=device)
        made: Any = torch._C._construct_storage_from_data_pointer(self.address_of(place), device, place.size)
        return made

    def bytes_of(self, place: SharedRange) -> torch.Tensor:
        storage = self.storage_of(place)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def synchronize(self) -> None:
        if "cuda" in self.devices:
            torch.cuda.synchronize(self.devices["cuda"])

    def place_of(self, tensor: torch.Tensor) -> SharedRange:
        """Where a tensor's storage stands: in a place of its own for as long as it lives."""
        storage, kind = tensor.untyped_storage(), tensor.device.type
        found = self._places.get(storage._cdata)
        if found is None or found[0].expired():
            size = storage.nbytes()
            room = self.room(kind, size)
            if size > room.size:
                raise MemoryError(f"{size} bytes between two processes, {room.size} are left")
            self._ends[kind][room.piece] = room.at + size
            found = self._places[storage._cdata] = (StorageWeakRef(storage), room._replace(size=size))
        return found[1]

    def room(self, kind: str, size: int = 0) -> SharedRange:
        """The largest range that is free, for an answer too; of a GPU at least so many bytes."""
        pieces, ends = self.pieces[kind], self._ends[kind]
        free = [piece.size - -(-end // _ALIGNMENT) * _ALIGNMENT for piece, end in zip(pieces, ends, strict=True)]
        if kind == "cuda" and max(free, default=0) < size:
            # Half of what there is, or a large case would have a piece for each of its tensors.
            free.append(max(size + _ALIGNMENT, _LEAST_PIECE, sum(piece.size for piece in pieces) // 2))
            self.openers.append(self.add_cuda(free[-1]))
            ends.append(0)
        # For a tensor the least that is enough: larger ones come later, and each new piece stays until the end.
        number = min(range(len(free)), key=lambda n: (free[n] < size, free[n] if size else -free[n]))
        return SharedRange(kind, number, pieces[number].size - free[number], max(0, free[number]))

    def sweep(self) -> None:
        self._places = {key: found for key, found in self._places.items() if not found[0].expired()}
        self._ends = {kind: [0] * len(pieces) for kind, pieces in self.pieces.items()}
        for _, place in self._places.values():
            ends = self._ends[place.kind]
            ends[place.piece] = max(ends[place.piece], place.at + place.size)
        if not self._ends["cpu"][0] and len(self.map) > _KEPT_BYTES:
            self.map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)  # let the system have most of the host's piece


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with {status}: a kernel's process needs CUDA IPC with its judge's")


class ReplyError(ValueError):
    """An answer that no unchanged process of a kernel gives."""


def send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(connection: socket.socket, limit: int | None = None) -> bytes:
    """One frame; empty if the other end is closed before all of it has come."""
    data, count = bytearray(), _LENGTH.size
    for is_length in (True, False):
        data, got = bytearray(count), 0
        while got < count:
            more = connection.recv_into(memoryview(data)[got:])
            if not more:
                return b""
            got += more
        if is_length:
            (count,) = _LENGTH.unpack(data)
            if limit is not None and count > limit:
                raise ReplyError(f"expected at most {limit} bytes, got {count}")
    return bytes(data)


@dataclass(eq=False)
class RemoteValue:
    number: int
    released: list[int]  # where its number goes then

    def __del__(self) -> None:
        self.released.append(self.number)


class _Packer(pickle.Pickler):
    shared: Shared
    written: set[SharedRange]

    def reducer_override(self, value: Any) -> Any:
        """Asked of what is not built in, unlike ``persistent_id``, which is asked of each number as well."""
        if type(value) is RemoteValue:
            return _kept, (value.number,)
        if isinstance(value, _HANDED):
            return value.handed().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if type(value) is not torch.Tensor:
            return NotImplemented
        form = (value.dtype, tuple(value.shape), value.stride())
        if value.is_meta:
            return _formed, form
        place = self.shared.place_of(value)
        if place not in self.written:
            self.written.add(place)
            self.shared.bytes_of(place).copy_(memory.storage_bytes(value))
        return _formed, (*form, value.storage_offset(), *place)


def pack(value: Any, shared: Shared) -> bytes:
    packer = _Packer(file := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    packer.shared, packer.written = shared, set()
    packer.dump(value)
    shared.synchronize()
    return file.getvalue()


_read: dict[str, Callable[..., Any]] = {}  # what finds a value by its number, and the storage of a place, meanwhile


def unpack(data: bytes, shared: Shared, kept: Mapping[int, Any]) -> Any:
    """What another process packed; tensors stay in the memory that both have."""
    _read.update(value=kept.__getitem__, storage=cache(lambda *place: shared.storage_of(SharedRange(*place))))
    return pickle.loads(data)


def _kept(number: int) -> Any:
    return _read["value"](number)


def _formed(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, *place: Any
) -> torch.Tensor:
    if not place:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    storage = _read["storage"](*place)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
