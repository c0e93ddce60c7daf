"""Triton kernels by Triton's interpreter, so that a machine without a GPU can judge their source.

What a GPU's compiler makes of it is another matter: such a variant counts as emulated and is never certified.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import DeviceCapability

_DEVIATION = Deviation("a kernel for GPUs", "interpreted by Triton on a CPU, not certified")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""What has Triton interpret. An engine that finds no driver does without Triton, unless no GPU is visible for now."""


class InterpretedLibrary(Library):
    """A library whose Triton kernels are interpreted.

    Triton decides that where a function is defined, so Triton and the library are imported here first.
    """

    def load(self) -> ModuleType:
        """Import the module.

        Raises:
            ImportError: it is missing or broken, or Triton was imported before to compile.
        """
        if self.module in sys.modules:
            return sys.modules[self.module]
        if _triton_compiles():
            raise ImportError("Triton was imported before, to compile; its kernels are interpreted in another process")
        with _environment():
            import_module("triton.experimental.gluon")  # else imported at the first call
            return super().load()


class InterpretedKernel(LibraryKernel):
    """What the interpreted variants have in common; stands before the class of the kernel.

    Libraries and declaration are those of the kernel, interpreted and never certified.

    Args:
        library: class of the libraries.
    """

    variant: ClassVar[str] = "interpreted"
    # NumPy computes, and has no bfloat16 (triton-lang/triton#11584).
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.float32]
    needed_capability: ClassVar[str] = "none, it is interpreted on a CPU"

    def __init_subclass__(cls, library: type[InterpretedLibrary] = InterpretedLibrary, **options: Any) -> None:
        super().__init_subclass__(**options)
        if InterpretedKernel in cls.__bases__:
            compiled: type[LibraryKernel] = cls.__bases__[1]
            cls.libraries = interpreted_libraries(compiled.libraries, library)
            declared = cls.__dict__.get("declaration", compiled.declaration)
            cls.declaration = replace(declared, deviations=(_DEVIATION, *declared.deviations), emulated=True)

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """A CPU."""
        return device_capability is None


def interpreted_libraries(
    libraries: tuple[Library, ...], kind: type[InterpretedLibrary] = InterpretedLibrary
) -> tuple[Library, ...]:
    """The same libraries with their kernels interpreted."""
    return tuple(
        kind(**{field.name: getattr(library, field.name) for field in fields(library)}) for library in libraries
    )


def _triton_compiles() -> bool:
    """Whether Triton is imported, and not for its interpreter."""
    triton = sys.modules.get("triton")
    return triton is not None and type(triton.language.sum).__name__ != "InterpretedFunction"


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
