"""What the harness saw run, beside what a backend tells of itself, as plain data. No torch: it travels."""

from dataclasses import dataclass, field

import msgspec

_OF_TORCH = ("at::native", "void at::", "at_cuda_detail", "compute_cuda_kernel", "nvjet", "Memcpy", "Memset")
"""Kernels that torch launches for anybody: fills, copies, elementwise arithmetic, indexing, matrix products."""


class Traced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ran when a backend was called under a profiler.

    Attributes:
        kernels: names of the kernels of one call, by capability.
        libraries: shared libraries that the backend brought into the process: what they are called on every machine,
            and SHA-256.
    """

    kernels: dict[str, tuple[str, ...]] = {}
    libraries: dict[str, str] = {}

    @property
    def distinct(self) -> tuple[str, ...]:
        """The kernels of all capabilities, without those that torch launches for anybody."""
        found = dict.fromkeys(name for names in self.kernels.values() for name in names)
        return tuple(name for name in found if not any(part in name for part in _OF_TORCH))

    def joined(self, other: "Traced") -> "Traced":
        """What either saw."""
        return Traced({**other.kernels, **self.kernels}, {**other.libraries, **self.libraries})


NOTHING_TRACED = Traced()
"""Of a run without a GPU, or of a backend that passed nothing."""


@dataclass(frozen=True)
class BackendFacts:
    """A backend as it is here.

    Attributes:
        name: name in reports.
        reference: what loads the backend again.
        reasons: why it is unavailable; empty if it can run.
        versions: versions of its distributions.
        emulated: it never counts as certified.
        deviations: (convention of its library, what the adapter does about it).
        rounding: the declared rounding classes by name.
        fingerprint: what tells that it is still the same: the digest of its file, or its versions.
    """

    name: str
    reference: str = ""
    reasons: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    emulated: bool = False
    deviations: tuple[tuple[str, str], ...] = ()
    rounding: dict[str, str] = field(default_factory=dict)
    fingerprint: str = ""
