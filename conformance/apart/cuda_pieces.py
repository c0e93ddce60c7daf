"""Memory of a GPU that another process may open: allocations of the driver, since torch's hold other tensors as well.

The driver's own functions, each for the context that torch uses on the current device.
"""

import ctypes
from typing import Any

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def allocate(size: int) -> int:
    """The address of so many new bytes.

    Raises:
        MemoryError: there are not so many.
    """
    address = ctypes.c_uint64()
    status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
    if status:
        raise MemoryError(f"{size} bytes of a GPU that two processes share: the driver refused them ({status})")
    return address.value


def exported(address: int) -> bytes:
    """What opens an allocation in another process."""
    handle = _Handle()
    _check("cuIpcGetMemHandle", _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)))
    return bytes(handle)


def opened(handle: bytes) -> int:
    """The address, here, of an allocation of another process."""
    address = ctypes.c_uint64()
    flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
    status = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
    _check("cuIpcOpenMemHandle", status)
    return address.value


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} failed with {status}; --apart needs CUDA IPC between processes of this machine")
