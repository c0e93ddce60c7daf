"""What of a record is shown, which records of earlier forms hold as well; those cannot be verified any more."""

from pathlib import Path

import msgspec

from mla_conformance.certificate.certificate import Finding, Unjudged, Worst
from mla_conformance.files.inputs import decode, read_text
from mla_conformance.judging.verdict import Status
from mla_conformance.report.counts import Counts


class _Pins(msgspec.Struct, frozen=True):
    versions: dict[str, str] = {}


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A record of any form from which its cases, their reasons and its figures can be read."""

    suite: str
    date: str
    backend: str
    reference: str
    device: str
    environment: dict[str, str]
    rounding: dict[str, str]
    counts: Counts
    worst: dict[str, Worst]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    lacking: dict[str, str]
    cases: dict[str, Status]
    versions: dict[str, str] = {}
    pins: _Pins = _Pins()

    @property
    def distributions(self) -> dict[str, str]:
        """Version of each distribution behind the backend."""
        return self.versions or self.pins.versions

    @property
    def worst_share(self) -> float:
        """The largest share of its error budget that a passed case used; 0 without one."""
        return max((entry.share for entry in self.worst.values()), default=0.0)


def read_shown(path: Path) -> Shown:
    """What is shown of a record.

    Raises:
        InputError: it cannot be read, or lacks something that is shown.
    """
    return decode(read_text(path), Shown, str(path))
