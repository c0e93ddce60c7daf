"""Memory that two processes map: one piece of the host's, from before they parted, and pieces of a GPU's."""

import ctypes
import mmap
from typing import Any, NamedTuple

import torch

from mla_conformance.apart import cuda_pieces

HOST = "cpu"
_NO_RESERVE = 0x4000
"""Linux' MAP_NORESERVE: of a piece as large as the machine's memory, only what is used counts."""
_KEPT_BYTES = 2**28
"""Of the host's piece, what need not be given back."""


class Place(NamedTuple):
    """Bytes that both processes know.

    Attributes:
        kind: type of the device.
        piece: number of the piece.
        at: first byte in it.
        size: how many.
    """

    kind: str
    piece: int
    at: int
    size: int


class Piece(NamedTuple):
    """Memory in one of the processes, by address and size in bytes."""

    address: int
    size: int


class Shared:
    """What one of two processes sees of their memory.

    Args:
        host_bytes: of the host's piece; to be made before the other process is forked.
    """

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
        address = cuda_pieces.allocate(size)
        self.pieces["cuda"].append(Piece(address, size))
        return cuda_pieces.exported(address) + size.to_bytes(8, "little")

    def open_cuda(self, opener: bytes) -> None:
        """One more piece, of the other process's."""
        address = cuda_pieces.opened(opener[:-8])
        self.pieces["cuda"].append(Piece(address, int.from_bytes(opener[-8:], "little")))

    def give_back(self) -> None:
        """Let the system have most of the host's piece, of which nothing is in use."""
        if len(self._map) > _KEPT_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES)

    def storage(self, place: Place) -> torch.UntypedStorage:
        """The bytes of a place as a storage."""
        device = self.device(place.kind)
        if not place.size:
            return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        address = self.pieces[place.kind][place.piece].address + place.at
        made: Any = torch._C._construct_storage_from_data_pointer(address, device, place.size)
        return made

    def bytes_of(self, place: Place) -> torch.Tensor:
        """The same as a tensor of uint8."""
        return torch.empty(0, dtype=torch.uint8, device=self.device(place.kind)).set_(self.storage(place))

    def device(self, kind: str) -> torch.device:
        """The device of this type."""
        return torch.device(HOST) if kind == HOST else self._device

    def synchronize(self) -> None:
        """Wait for what was launched on the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
