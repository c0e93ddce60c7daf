"""A GPU's memory between addresses that are reserved and not mapped, by the driver's virtual memory calls.

Source: CUDA driver API, "Virtual Memory Management"; structures as ``cuda.h`` declares them.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaRoom:
    """At least ``size`` bytes of the current GPU, whole granules with an unmapped one on either side.

    Attributes:
        capacity: bytes of it.
    """

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
        """The bytes from an offset on, so many, as a uint8 tensor with a storage of its own."""
        return torch.as_tensor(_Bytes(self, offset, length), device="cuda")


class _Bytes:
    """Some of them, as torch takes memory that is not its own; it keeps this object for as long as the tensor lives."""

    def __init__(self, room: CudaRoom, offset: int, length: int) -> None:
        self._room = room
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (room.address + offset, False),
            "version": 3,
        }


def _give_back(inside: Any, held: Any, handle: Any, reserved: Any, whole: Any) -> None:
    """Every call of its own: after a fault the driver refuses them all."""
    library = _library()
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
