"""What adapters of libraries have in common, prefill and decode alike: packages, variants, evidence."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

from mla_conformance.backends.dependencies import Library
from mla_conformance.backends.kernel import NamedKernel
from mla_conformance.backends.platform import DeviceCapability, Devices


class LibraryKernel(NamedKernel):
    """A kernel that comes with a library; several of one name form a family.

    Attributes:
        libraries: what must be installed; calls go to the first.
        devices: that the kernel runs on; None where ``supports_compute_capability`` says so otherwise.
        variant: name of this kernel among those of its family; empty for a family itself.
        variants: the kernels of a family by name, filled as they are defined.
    """

    libraries: ClassVar[tuple[Library, ...]] = ()
    devices: ClassVar[Devices | None] = None
    variant: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, type[Self]]] = MappingProxyType({})
    _served: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, variant: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__dict__.get("devices"):
            cls.needed_capability = cls.__dict__["devices"].needed
        if variant:
            cls.variant = variant
            family = cls.__mro__[1]
            family.variants = MappingProxyType({**family.variants, variant: cls})  # type: ignore[attr-defined]

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
    def preference(cls, device_capability: DeviceCapability | None) -> tuple[str, ...]:
        """Variants of a family in the order in which a device tries them."""
        return tuple(cls.variants)

    @classmethod
    def resolve(cls, device_capability: DeviceCapability | None) -> type[Self]:
        """The class that serves calls on a device: of a family the first variant that is installed and can run there.

        If none can, the first that the device could run, so that its reasons name what to install.
        """
        if cls.variant or not cls.variants:
            return cls
        candidates = [cls.variants[name] for name in cls.preference(device_capability)]
        able = [c for c in candidates if c.supports_compute_capability(device_capability)]
        return next((c for c in able if c.is_available()), (able or candidates)[0])

    @classmethod
    def missing_dependencies(cls) -> list[str]:
        """What must be installed first."""
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

    def kernel_evidence(self) -> dict[str, str]:
        """Versions of the libraries, the variant, and what the last call was served by."""
        found = {library.distribution: library.version() for library in self.libraries}
        return found | ({"variant": self.variant} if self.variant else {}) | dict(self._served)
