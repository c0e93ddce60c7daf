"""What a certificate is tied to beside what was seen to run: sources, packages, and the harness itself."""

from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from importlib.resources import files
from pathlib import Path

import msgspec

from mla_conformance.backends.references import BackendReference
from mla_conformance.files.installed import (
    Installed,
    commit_of,
    files_digest,
    harness_files,
    installed,
    source_digests,
)


class Pins(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What judged and what was judged, byte by byte; what a profiler and the loader saw stands in ``Traced``.

    Attributes:
        sources: SHA-256 of the modules that the backend's classes stand in, and of what they import that no wheel has.
        versions: version of each distribution behind the backend.
        installed: what of each is installed.
        harness: what judged.
    """

    sources: dict[str, str] = {}
    versions: dict[str, str] = {}
    installed: dict[str, Installed] = {}
    harness: Installed = Installed()

    @staticmethod
    def of(backend: BackendReference, versions: Mapping[str, str]) -> "Pins":
        """The pins of a backend as it is here, whose adapter names distributions with these versions."""
        reported = {**_owners(backend), **versions}
        found = {name: installed(name) for name in reported}
        return Pins(
            sources=source_digests(backend.modules()),
            versions=reported,
            installed={name: pin for name, pin in found.items() if pin is not None},
            harness=harness(),
        )


def harness() -> Installed:
    """The harness as it is here: the same files have the same digest, from a wheel, a checkout or a copy of one."""
    commit, clean = commit_of(Path(str(files("mla_conformance"))).parent)
    return Installed(files=files_digest(harness_files()), commit=commit, clean=clean)


def _owners(backend: BackendReference) -> dict[str, str]:
    """The distributions that brought the classes themselves, unless they are the harness's own."""
    tops = {name.partition(".")[0] for name in backend.modules() if not name.endswith(".py")} - {"mla_conformance"}
    owners = packages_distributions() if tops else {}
    return {name: version(name) for top in sorted(tops) for name in owners.get(top, ())}
