"""Calls and problems as bytes for another process: tensors lie in memory that both map, the rest is pickled.

What is unpacked was packed by a process that is trusted. What the kernel's process answers is never unpickled; see
``reply.py``.
"""

import io
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_conformance.driving.shared import HOST, Shared, SharedRange
from mla_conformance.problems.cache_bytes import CacheImage
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem

_ALIGNMENT = 512
_LEAST_PIECE = 2**28
"""Bytes of a GPU's memory that are asked for at once."""
_MOST_SHARE = 8
"""A process that holds more than this part of a GPU for what it hands over should be replaced."""


class Arena:
    """Where what is handed over stands: each storage has a place of its own for as long as it lives.

    Attributes:
        openers: of pieces that the other process has not been told of.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.openers: list[bytes] = []
        self._places: dict[int, tuple[StorageWeakRef, SharedRange]] = {}
        self._ends = {HOST: 0, "cuda": 0}

    def place_of(self, tensor: torch.Tensor) -> SharedRange:
        """The place of a tensor's storage."""
        storage, kind = tensor.untyped_storage(), tensor.device.type
        found = self._places.get(storage._cdata)
        if found is None or found[0].expired():
            self.require(kind, size := storage.nbytes())
            room = self._room(kind)
            if size > room.size:
                raise MemoryError(f"{size} bytes between two processes, {room.size} are left")
            self._ends[kind] = room.at + size
            found = self._places[storage._cdata] = (StorageWeakRef(storage), room._replace(size=size))
        return found[1]

    def rooms(self) -> list[SharedRange]:
        """What is free for an answer, by type of device."""
        return [self._room(kind) for kind, pieces in self.shared.pieces.items() if pieces]

    def require(self, kind: str, size: int) -> None:
        if kind == "cuda" and self._room(kind).size < size:
            self.openers.append(self.shared.add_cuda(max(size + _ALIGNMENT, _LEAST_PIECE)))
            self._ends[kind] = 0

    def sweep(self) -> None:
        """Free what belongs to storages that are gone, up to the last that is not."""
        self._places = {key: found for key, found in self._places.items() if not found[0].expired()}
        ends = dict.fromkeys(self._ends, 0)
        for _, place in self._places.values():
            if place.piece == len(self.shared.pieces[place.kind]) - 1:
                ends[place.kind] = max(ends[place.kind], place.at + place.size)
        if not ends[HOST]:
            self.shared.give_back()
        self._ends = ends

    @property
    def is_large(self) -> bool:
        pieces = self.shared.pieces["cuda"]
        if len(pieces) < 2:
            return False
        total = torch.cuda.get_device_properties(self.shared.device("cuda")).total_memory
        return _MOST_SHARE * sum(piece.size for piece in pieces) > total

    def _room(self, kind: str) -> SharedRange:
        pieces = self.shared.pieces[kind]
        if not pieces:
            return SharedRange(kind, 0, 0, 0)
        at = -(-self._ends[kind] // _ALIGNMENT) * _ALIGNMENT
        return SharedRange(kind, len(pieces) - 1, at, max(0, pieces[-1].size - at))


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arena: Arena) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._arena = arena
        self._written: set[SharedRange] = set()

    def persistent_id(self, tensor: Any) -> Any:
        if type(tensor) is not torch.Tensor:
            return None
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.is_meta:
            return form
        place = self._arena.place_of(tensor)
        if place not in self._written:
            self._written.add(place)
            self._arena.shared.bytes_of(place).copy_(storage_bytes(tensor))
        return (*form, place, tensor.storage_offset())

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, KernelCall | Problem | CacheImage):
            return NotImplemented
        shown = value.handed()
        return NotImplemented if shown is value else shown.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def pack(value: Any, arena: Arena) -> bytes:
    """A value as bytes; calls and problems in it as a backend may know them."""
    file = io.BytesIO()
    _Packer(file, arena).dump(value)
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
