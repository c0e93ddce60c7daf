"""What a certificate is tied to beside what was seen to run: sources, packages, and the harness itself."""

from collections.abc import Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path

import msgspec

from mla_conformance.backends.references import BackendReference
from mla_conformance.files.inputs import InputError
from mla_conformance.files.installed import (
    Installed,
    commit_of,
    files_digest,
    harness_files,
    harness_folder,
    installed,
    module_file,
    source_digests,
    source_name,
)
from mla_conformance.files.places import place_of
from mla_conformance.files.wheels import owned_by_wheels


class Pins(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What judged and what was judged, byte by byte; what a profiler and the loader saw stands in ``Traced``."""

    # SHA-256 of the modules that the backend's classes stand in, of what they import that no wheel has, and of every
    # other module that was loaded and that no wheel has, by its place
    sources: dict[str, str] = {}
    versions: dict[str, str] = {}  # version of each distribution behind the backend
    installed: dict[str, Installed] = {}  # what of each is installed
    harness: Installed = Installed()  # what judged

    @staticmethod
    def of(backend: BackendReference, versions: Mapping[str, str], loaded: Mapping[str, str] | None = None) -> "Pins":
        """The pins of a backend as it is here.

        Args:
            backend: the backend.
            versions: of the distributions that its adapter names.
            loaded: SHA-256 of the code that its processes have loaded, by path.
        """
        modules = {path: digest for path, digest in (loaded or {}).items() if not _is_library(path)}
        owned, own = owned_by_wheels(modules)
        reported = {**{name: version(name) for name in owned}, **_owners(backend), **versions}
        found = {name: installed(name) for name in reported}
        return Pins(
            sources=_with_loaded(source_digests(backend.modules()), own, backend),
            versions=reported,
            installed={name: pin for name, pin in found.items() if pin is not None},
            harness=harness(),
        )


def libraries(loaded: Mapping[str, str], backend: BackendReference) -> dict[str, str]:
    """The shared libraries among what was loaded: SHA-256 by what they are called on every machine."""
    return {place_of(Path(path), backend.file): digest for path, digest in loaded.items() if _is_library(path)}


def _is_library(path: str) -> bool:
    return ".so" in Path(path).suffixes


def _with_loaded(sources: dict[str, str], own: Mapping[str, str], backend: BackendReference) -> dict[str, str]:
    """What stands there and what was loaded, each once."""
    places = {source_name(module): module for module in backend.modules()}
    stands = {str(file.resolve()): name for name in sources if (file := module_file(places.get(name, name)))}
    found = dict(sources)
    for path, digest in own.items():
        name = stands.get(path)
        if name is None:
            found[place_of(Path(path), backend.file and backend.file.resolve())] = digest
        elif not name.startswith("mla_conformance.") and sources[name] != digest:
            raise InputError(f"{path}: what was loaded, SHA-256 {digest}, is not what stands there: {sources[name]}")
    return dict(sorted(found.items()))


def harness() -> Installed:
    """The harness as it is here: the same files have the same digest, from a wheel, a checkout or a copy of one."""
    commit, clean = commit_of(harness_folder())
    return Installed(files=files_digest(harness_files()), commit=commit, clean=clean)


def _owners(backend: BackendReference) -> dict[str, str]:
    """The distributions that brought the classes themselves, unless they are the harness's own."""
    tops = {name.partition(".")[0] for name in backend.modules() if not name.endswith(".py")} - {"mla_conformance"}
    owners = packages_distributions() if tops else {}
    return {name: version(name) for top in sorted(tops) for name in owners.get(top, ())}
