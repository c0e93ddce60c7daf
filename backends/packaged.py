"""What adapters of libraries have in common, whatever their role: packages, variants, evidence, refusals.

An adapter is a table, the attributes of its class, and a function that calls its library. A variant is a subclass of
what differs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.kernel import NamedKernel
from mla_conformance.backends.platform import (
    DeviceCapability,
    Devices,
)

UNIFORM_BATCH, ONE_TOKEN_EACH = AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
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


def declared(distributions: str, *deviations: Deviation | tuple[str, str], **declares: Any) -> Declaration:
    """A declaration; a deviation without a name is the pair of what the library does and what the adapter does."""
    named = tuple(each if isinstance(each, Deviation) else Deviation(*each) for each in deviations)
    return Declaration(distributions=tuple(distributions.split()), deviations=named, **declares)


def further(declaration: Declaration, *deviations: Deviation | tuple[str, str], **declares: Any) -> Declaration:
    """The same with further deviations behind, and what else differs."""
    more = declared("", *deviations).deviations
    return replace(declaration, deviations=(*declaration.deviations, *more), **declares)


class LibraryKernel(NamedKernel):
    """A kernel that comes with a library, with its variants.

    Attributes:
        libraries: what must be installed; calls go to the first.
        devices: that the kernel runs on; None where ``supports_compute_capability`` says so otherwise.
        variant: name of this kernel among those that share a name.
        variants: those kernels by name, filled as they are defined.
        by_device: of a family, which has no kernel of its own, those that a device tries, in order, by the major number
            of its compute capability; under 0 those of all other devices.
    """

    libraries: ClassVar[tuple[Library, ...]] = ()
    devices: ClassVar[Devices | None] = None
    variant: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, type[Self]]] = MappingProxyType({})
    by_device: ClassVar[Mapping[int, tuple[str, ...]]] = MappingProxyType({})
    _served: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, variant: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__dict__.get("devices"):
            cls.needed_capability = cls.__dict__["devices"].needed
        if variant:
            cls.variant = variant
            cls.variant_of(cls.__mro__[1])

    @classmethod
    def variant_of(cls, kernel: type[Any]) -> None:
        """Stand among the variants of a kernel, or of the one that this is a variant of."""
        bases: Any = kernel.__mro__
        shared = next(base for base in bases if not base.variant)
        shared.variants = MappingProxyType({**shared.variants, cls.variant: cls})

    @property
    def library(self) -> Any:
        """The module that calls go to, imported.

        Raises:
            ImportError: it is missing or broken.
        """
        return self.libraries[0].load()

    @classmethod
    def supports_compute_capability(cls, device_capability: DeviceCapability | None) -> bool:
        """Whether a device of this compute capability is one of ``devices``."""
        return cls.devices is None or cls.devices.include(device_capability)

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type[Self]:
        """The class that serves calls on a device: of a family the first variant that is installed and can run there.

        If none can, the first that the device could run, so that its reasons name what to install.
        """
        if cls.variant or not cls.by_device:
            return cls
        names = cls.by_device.get(device_capability.major if device_capability else 0, cls.by_device[0])
        candidates = [cls.variants[name] for name in names]
        able = [c for c in candidates if c.supports_compute_capability(device_capability)]
        return next((c for c in able if c.is_available()), (able or candidates)[0])

    @classmethod
    def not_a_family(cls) -> NotImplementedError:
        """What a call of a family itself raises."""
        return NotImplementedError(f"{cls.name} is a family of kernels: choose one of {', '.join(cls.variants)}")

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        return [reason for library in cls.libraries for reason in library.missing()]

    @classmethod
    def broken_dependencies(cls) -> list[str]:
        """What is installed but does not import, or lacks this kernel; imports the libraries."""
        broken = [reason for library in cls.libraries for reason in library.broken()]
        return broken if broken or cls.missing_dependencies() else cls.lacks()

    @classmethod
    def lacks(cls) -> list[str]:
        """Why libraries that import are without this kernel; empty if they have it."""
        return []

    @classmethod
    def validate_configuration(cls, device_capability: DeviceCapability | None, selector_config: Any) -> list[str]:
        """Reasons why the kernel cannot be used: those of its role, and behind them its own."""
        role: Any = super()
        reasons: list[str] = role.validate_configuration(device_capability, selector_config)
        return [*reasons, *cls.refuses(device_capability, selector_config)]

    @classmethod
    def refuses(cls, device_capability: DeviceCapability | None, config: Any) -> Iterator[str]:
        """Reasons that no attribute of the role declares."""
        return iter(())

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of the libraries, the variant, and what the last call was served by."""
        found = {library.distribution: library.version() for library in self.libraries}
        return found | ({"variant": self.variant} if self.variant else {}) | dict(self._served)
