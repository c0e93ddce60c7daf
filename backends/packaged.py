"""What an adapter of a library is made of: a table, which are its attributes, and a function that calls its library."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch

from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.declaration import Declaration, Deviation, LseClass, Precision, Rounding
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.kernel import DeviceCapability, NamedKernel


class Devices(NamedTuple):
    needed: str  # their compute capabilities, for a person
    first: tuple[int, int]  # the least of them
    end: tuple[int, int] | None = None  # the least beyond them; None without one
    cpu: bool = False  # whether a CPU is one of them
    but: int = 0  # the major number of others between


_ANY = Devices("", (0, 0), cpu=True, but=-1)
CPU_ALONE = Devices("", (0, 0), (0, 0), cpu=True)
FROM_TURING = Devices("7.5 or newer", (7, 5))
FROM_AMPERE = Devices("8.0 or newer", (8, 0))
FROM_ADA = Devices("8.9 or newer", (8, 9))
FROM_HOPPER = Devices("9.0 or newer", (9, 0))
HOPPER = Devices("9.0", (9, 0), (10, 0))
BLACKWELL = Devices("10.x", (10, 0), (11, 0))  # of data centres: 10.0, 10.3, 10.7
UNIFORM_BATCH, ONE_TOKEN_EACH = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
DEQUANTISES = Rounding(dequantised_keys=Precision.MODEL)
FP22 = Rounding(accumulation=Precision.FP22)
SCALED_P_FP22 = Rounding(p=Precision.SCALED_E4M3, accumulation=Precision.FP22)
IN_PARTS = Rounding(partial_outputs=Precision.MODEL)
ROUNDED_P_IN_PARTS = Rounding(lse=LseClass.ROUNDED_P, partial_outputs=Precision.MODEL)

JOINS_Q = Deviation("wants the latent and the rope part of the query in one tensor", "joins them")
PARTS_CACHE = Deviation(
    "wants the latent and the rope part of the cache apart", "two views of the one cache, not copied"
)
PARTS_BOTH = Deviation("wants latent and rope part of queries and cache apart", "two views of each, not copied")
COPIES = Deviation("faults on rows that do not start at multiples of 16 bytes", "such operands are copied")
PACKS_TABLE = Deviation("wants a packed block table", "is made contiguous")
PAGE_AT_ONCE = Deviation("reads a page at once", "pages of 16, 32 and 64 tokens are declared")
NEW_SCHEDULE = Deviation("a schedule holds for one batch of lengths", "a new one at each call, made on the device")
NO_OUT = Deviation("no out argument", "copies the result into out")
RETURNS_NO_LSE = Deviation("returns no LSE", "declared unsupported")
RETURNS_NO_LSE_OF_CHUNKS = Deviation("returns no LSE", "declared unsupported, context chunks with it")
COMPUTES_NO_LSE = Deviation("computes no LSE", "declared unsupported")
LSE_TOKENS_FIRST = Deviation("LSE [T, N]", "transposed")
LSE_TO_BASE_2 = Deviation("LSE to base 2, [T, N]", "the natural one is asked for and transposed")
LSE_INFINITE = Deviation("LSE +inf in a row without keys", "-inf in the rows that the lengths say see no key")
NAN_WITHOUT_KEYS = Deviation("a row without keys is NaN", "0 and -inf in the rows that the lengths say see no key")
LSE_OF_ROUNDED_P = Deviation("the row sum adds P as rounded: the LSE is off by up to 2^-9", "declared rounded-p")
PARTIAL_OUTPUTS = Deviation("outputs of split keys are stored in the model's dtype", "declared partial outputs: model")
FP22_SUMS = Deviation("sums of e4m3 products keep 13 bits behind the point, for any number of keys", "declared fp22")
_UNSCALED = "rounds {} to e4m3, without a scale, where the cache is e4m3; no rounding class describes that"
UNSCALED_P, UNSCALED_Q_AND_P = (Deviation(_UNSCALED.format(x), "declared unsupported") for x in ("P", "q and P"))
_INTERPRETED = Deviation("a kernel for GPUs", "interpreted by Triton on a CPU, not certified")
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""What has Triton interpret. An engine that finds no driver does without Triton, unless no GPU is visible for now."""
_Kernel = TypeVar("_Kernel", bound="type[LibraryKernel]")


def declared(distributions: str, *deviations: Deviation | tuple[str, str], **declares: Any) -> Declaration:
    """A declaration; a deviation without a name is the pair of what the library does and what the adapter does."""
    named = tuple(each if isinstance(each, Deviation) else Deviation(*each) for each in deviations)
    return Declaration(distributions=tuple(distributions.split()), deviations=named, **declares)


def further(declaration: Declaration, *deviations: Deviation | tuple[str, str], **declares: Any) -> Declaration:
    """The same with further deviations behind, and what else differs."""
    return replace(declaration, deviations=(*declaration.deviations, *declared("", *deviations).deviations), **declares)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment for a while; these alone are put back, what a library sets stays."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_extra(name: str, module: str, distribution: str = "", note: str = "", **other: Any) -> Library:
    """A library that an extra of this project installs, by default that of the same name."""
    return Library(module, distribution or name, f"pip install 'mla-conformance[{name}]'", note, **other)


def has_parameter(function: Any, parameter: str) -> bool:
    """Whether a function has such a parameter, which tells versions and builds of a library apart."""
    return parameter in signature(function).parameters


class LibraryKernel(NamedKernel):
    """A kernel that comes with a library, with its variants."""

    libraries: ClassVar[tuple[Library, ...]] = ()  # what must be installed; calls go to the first
    devices: ClassVar[Devices | None] = None  # that it runs on; None where ``supports_compute_capability`` says so
    variant: ClassVar[str] = ""  # name of this kernel among those that share a name
    variants: ClassVar[Mapping[str, type[Self]]] = MappingProxyType({})  # those by name, filled as they are defined
    # of a family, which has no kernel of its own, those that a device tries, in order, by the major number of its
    # compute capability; under 0 those of all other devices
    by_device: ClassVar[Mapping[int, tuple[str, ...]]] = MappingProxyType({})
    of_torch: ClassVar[Mapping[str, str]] = MappingProxyType({})  # evidence of what comes with torch, its version first
    # why and when a configuration ``c`` on a device of this compute capability is refused beside its role's reasons
    refused: ClassVar[Mapping[str, Callable[[Any, Any], object]]] = MappingProxyType({})
    _served: Mapping[str, str] = MappingProxyType({})  # what the last call was served by

    def __init_subclass__(cls, variant: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if devices := cls.__dict__.get("devices"):
            cls.needed_capability = devices.needed
        if variant:
            bases: Any = cls.__mro__[1:]
            whole = next(base for base in bases if getattr(base, "name", "") and not base.variant)
            cls.variant, whole.variants = variant, MappingProxyType({**whole.variants, variant: cls})

    @classmethod
    def also(cls, variant: str, *deviations: Deviation | tuple[str, str], **changes: Any) -> type[Self]:
        """A variant of this kernel that deviates further and whose attributes, or fields of its declaration, differ."""
        declares = {name: changes.pop(name) for name in ("rounding", "e4m3_rounding") if name in changes}
        given = {"__module__": cls.__module__, "__doc__": f"Variant {variant}."}
        given |= {"declaration": further(cls.declaration, *deviations, **declares)} | changes
        made: Any = type(cls)
        return made(f"{cls.__name__}_{variant.replace('-', '_')}", (cls,), given, variant=variant)

    @property
    def library(self) -> Any:
        if self.by_device and not self.variant:
            raise NotImplementedError(f"{self.name} is a family of kernels: choose one of {', '.join(self.variants)}")
        return self.libraries[0].found().load()

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        _, first, end, cpu, but = cls.devices or _ANY
        if device_capability is None:
            return cpu
        return first <= device_capability < (end or (math.inf, 0)) and device_capability[0] != but

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type[Self]:
        """Of a family the first variant that is installed and can run there, else the first that could."""
        if cls.variant or not cls.by_device:
            return cls
        names = cls.by_device.get(device_capability.major if device_capability else 0, cls.by_device[0])
        candidates = [cls.variants[name] for name in names]
        able = [c for c in candidates if c.supports_compute_capability(device_capability)]
        return next((c for c in able if c.is_available()), (able or candidates)[0])

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        return [reason for library in cls.libraries for reason in library.found().missing()]

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        broken = [reason for library in cls.libraries for reason in library.found().broken()]
        return broken or ([] if cls.missing_dependencies() else [reason for reason in (cls.lacks(),) if reason])

    @classmethod
    def lacks(cls) -> str:
        return ""

    @classmethod
    def validate_configuration(cls, device_capability: DeviceCapability | None, selector_config: Any) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        asked = {"c": selector_config, "device": device_capability}
        return [*reasons, *(said.format(**asked) for said, when in cls.refused.items() if when(*asked.values()))]

    def kernel_evidence(self) -> dict[str, str]:
        found = dict(self.of_torch)
        for library in self.libraries:
            build = library.found()
            found |= {build.distribution: build.version()} | ({"module": build.module} if library.other else {})
        return found | ({"variant": self.variant} if self.variant else {}) | dict(self._served)


class InterpretedLibrary(Library):
    """A library whose Triton kernels are interpreted, which is decided where they are defined."""

    def load(self) -> ModuleType:
        if self.module in sys.modules:
            return sys.modules[self.module]
        triton = sys.modules.get("triton")
        if triton is not None and type(triton.language.sum).__name__ != "InterpretedFunction":
            raise ImportError("Triton was imported before, to compile; its kernels are interpreted in another process")
        with environment(ENVIRONMENT):
            import_module("triton.experimental.gluon")  # else imported at the first call
            return self.interpreted()

    def interpreted(self) -> ModuleType:
        return super().load()


class InterpretedKernel(LibraryKernel):
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
    """The same source by Triton's interpreter, as a variant with what differs in ``changes``; it is never certified."""
    said = changes.pop("declaration", kernel.declaration)
    given = {
        "__module__": kernel.__module__,
        "__doc__": "The same source by Triton's interpreter.",
        "libraries": tuple(library(**vars(each)) for each in kernel.libraries),
        "declaration": replace(said, deviations=(_INTERPRETED, *said.deviations), emulated=True),
    }
    make: Any = type(kernel)
    name, bases = f"{kernel.__name__}Interpreted", (InterpretedKernel, kernel)
    return make(name, bases, given | changes, variant=variant)
