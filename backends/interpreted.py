"""Triton kernels by Triton's interpreter, so that a machine without a GPU can judge their source.

What a GPU's compiler makes of it is another matter: such a variant counts as emulated and is never certified.
"""

import os
import sys
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch

from mla_conformance.backends.declaration import Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.packaged import LibraryKernel
from mla_conformance.backends.platform import DeviceCapability

_DEVIATION = Deviation("a kernel for GPUs", "interpreted by Triton on a CPU, not certified")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""What has Triton interpret. An engine that finds no driver does without Triton, unless no GPU is visible for now."""
_Kernel = TypeVar("_Kernel", bound=type[LibraryKernel])


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
        triton = sys.modules.get("triton")
        if triton is not None and type(triton.language.sum).__name__ != "InterpretedFunction":
            raise ImportError("Triton was imported before, to compile; its kernels are interpreted in another process")
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            import_module("triton.experimental.gluon")  # else imported at the first call
            return super().load()
        finally:  # these alone: what the library sets stays
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class InterpretedKernel(LibraryKernel):
    """What the interpreted variants have in common; :func:`interpreted` makes them."""

    # NumPy computes, and has no bfloat16 (triton-lang/triton#11584).
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.float32]
    needed_capability: ClassVar[str] = "none, it is interpreted on a CPU"

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        return device_capability is None


def interpreted(
    kernel: _Kernel,
    library: type[InterpretedLibrary] = InterpretedLibrary,
    variant: str = "interpreted",
    **changes: Any,
) -> _Kernel:
    """The same source by Triton's interpreter, as a variant of a kernel.

    Args:
        kernel: the compiled one, whose libraries and declaration it has, interpreted and never certified.
        library: class of the libraries.
        variant: its name.
        changes: attributes that differ.
    """
    said = changes.pop("declaration", kernel.declaration)
    given = {
        "__module__": kernel.__module__,
        "__doc__": "The same source by Triton's interpreter.",
        "variant": variant,
        "libraries": tuple(library(**vars(each)) for each in kernel.libraries),
        "declaration": replace(said, deviations=(_DEVIATION, *said.deviations), emulated=True),
    }
    make: Any = type(kernel)
    made: _Kernel = make(f"{kernel.__name__}Interpreted", (InterpretedKernel, kernel), given | changes)
    made.variant_of(kernel)
    return made
