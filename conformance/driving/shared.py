"""What two processes share: frames that they send, and memory that both map.

One piece of memory is the host's, from before they parted, others are a GPU's. Those are allocations of the driver, by
its own functions, each for the context that torch uses on the current device: torch's allocations hold other tensors as
well. A frame is eight bytes of length, and so many bytes.
"""

import ctypes
import mmap
import socket
import struct
from typing import Any, NamedTuple

import torch

HOST = "cpu"
_LENGTH = struct.Struct("<Q")
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2
_NO_RESERVE = 0x4000
"""Linux' MAP_NORESERVE: of a piece as large as the machine's memory, only what is used counts."""
_KEPT_BYTES = 2**28
"""Of the host's piece, what need not be given back."""


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
        self._map = mmap.mmap(-1, host_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
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

    def give_back(self) -> None:
        """Let the system have most of the host's piece, of which nothing is in use."""
        if len(self._map) > _KEPT_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)

    def storage(self, place: SharedRange) -> torch.UntypedStorage:
        """The bytes of a place as a storage."""
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
