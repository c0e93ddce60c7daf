"""The floating-point control of the calling thread: direction of rounding, denormals, traps."""

import ctypes
import platform
from typing import Any

_ENVIRONMENT_BYTES = 64
_CONTROL = 28
"""Where MXCSR stands in C's ``fenv_t`` of x86-64, 4 bytes."""
_STICKY = 0x3F
"""Bits that record what happened, which every inexact result sets."""


def _library() -> Any:
    """C's functions, where the layout of their environment is known."""
    library = ctypes.CDLL(None) if platform.system() == "Linux" and platform.machine() == "x86_64" else None
    return library if hasattr(library, "fegetenv") else None


_LIBRARY = _library()


def _environment() -> Any:
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _LIBRARY.fegetenv(environment)
    return environment


def read_control() -> str:
    """The control bits in hexadecimal; 0x1f80 rounds to nearest and keeps denormals. Empty where they are not known."""
    if _LIBRARY is None:
        return ""
    return hex(int.from_bytes(_environment()[_CONTROL : _CONTROL + 4], "little") & ~_STICKY)


def restore_control(control: str) -> None:
    """Set the control bits to what :func:`read_control` said."""
    environment = _environment()
    environment[_CONTROL : _CONTROL + 4] = int(control, 16).to_bytes(4, "little")
    _LIBRARY.fesetenv(environment)
