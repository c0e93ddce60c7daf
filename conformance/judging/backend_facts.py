"""What a report tells of a backend without its verdicts, as plain data. No torch: it travels between processes."""

from dataclasses import dataclass, field


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
