"""What a certificate is tied to: sources, packages and the harness; what was changed here, or is another build."""

import base64
import csv
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mla_conformance.backends.references import BackendReference
from mla_conformance.files import installed as builds
from mla_conformance.files.places import file_digest, find_place, harness_files, is_of_the_machine, place_of
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import Traced
from mla_conformance.report.differences import differing

_OF_A_MACHINE = ("device", "compute_capability", "driver", "cuda", "cudnn", "torch", "python")
_EVERYBODYS = ("mla-conformance", "torch", "numpy")
_CHOSEN = "triton"  # torch brings it, and kernels are written in it


class Pins(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # SHA-256 of the modules that the backend's classes stand in, of what they import that no wheel has, and of every
    # other module that was loaded and that no wheel has, by its place
    sources: dict[str, str] = {}
    versions: dict[str, str] = {}  # of each distribution behind the backend
    installed: dict[str, builds.Installed] = {}
    harness: builds.Installed = builds.Installed()

    @staticmethod
    def of(backend: BackendReference, versions: Mapping[str, str], loaded: Mapping[str, str] | None = None) -> "Pins":
        """A backend as it is here; what its processes ``loaded``, SHA-256 by path, has to stand there."""
        owned, own = owned_by_wheels({path: digest for path, digest in (loaded or {}).items() if not _is_library(path)})
        # Beside what was loaded the distributions that brought the classes themselves, unless they are the harness's.
        tops = {name.partition(".")[0] for name in backend.modules() if not name.endswith(".py")} - {"mla_conformance"}
        owners = packages_distributions() if tops else {}
        named = [*owned, *(name for top in sorted(tops) for name in owners.get(top, ()))]
        reported = {**{name: version(name) for name in named}, **versions}
        sources = builds.source_digests(backend.modules())
        places = {builds.source_name(module): module for module in backend.modules()}
        stands = {str(file.resolve()): name for name in sources if (file := builds.module_file(places.get(name, name)))}
        for path, digest in own.items():
            name = stands.get(path, "")
            if not name:
                sources[place_of(Path(path), backend.file and backend.file.resolve())] = digest
            elif not name.startswith("mla_conformance.") and sources[name] != digest:
                found = f"what was loaded, SHA-256 {digest}, is not what stands there: {sources[name]}"
                raise InputError(f"{path}: {found}")
        packages = {name: pin for name in reported if (pin := builds.installed(name)) is not None}
        return Pins(sources=dict(sorted(sources.items())), versions=reported, installed=packages, harness=harness())


def owned_by_wheels(loaded: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Of loaded modules the distributions whose wheels hold them, and those in no wheel; without what everybody has."""
    harness = {str(path.resolve()) for path in harness_files().values()}
    owners = packages_distributions() if loaded.keys() - harness else {}
    found, own = dict[str, None](), dict[str, str]()
    for path, digest in loaded.items():
        name = place_of(Path(path))
        top = name.partition("/")[0].removesuffix(".py")
        said = "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")
        owner = next((each for each in owners.get(top, ()) if _recorded(each).get(name) == said), "")
        if not owner and path not in harness:
            own[path] = digest
        elif owner and canonicalize_name(owner) not in _everybodys():
            found[owner] = None
    return sorted(found), own


@cache
def _recorded(name: str) -> dict[str, str]:
    """Digests by its files' names, in URL-safe base64 without padding."""
    lines = csv.reader((distribution(name).read_text("RECORD") or "").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 3}


@cache
def _everybodys() -> frozenset[str]:
    found, left = set[str](), list(_EVERYBODYS)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            try:
                asked = map(Requirement, distribution(name).requires or ())
            except PackageNotFoundError:
                continue
            left += [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return frozenset(found - {_CHOSEN})


def libraries(loaded: Mapping[str, str], backend: BackendReference) -> dict[str, str]:
    return {place_of(Path(path), backend.file): digest for path, digest in loaded.items() if _is_library(path)}


def _is_library(path: str) -> bool:
    return ".so" in Path(path).suffixes


def harness() -> builds.Installed:
    """As it is here: the same files have the same digest, from a wheel, a checkout or a copy of one."""
    commit, clean = builds.commit_of(builds.harness_folder())
    return builds.Installed(files=builds.files_digest(harness_files()), commit=commit, clean=clean)


_harness_here = cache(harness)


class Weight(Enum):
    AGAINST = "against"  # the certificate is not of what is here, although it names the same
    OTHER_BUILD = "other build"  # here is another build, which the certificate says nothing of
    REPORTED = "reported"  # not compared, or may differ between machines by rights


class Remark(NamedTuple):
    weight: Weight
    sentence: str


def compare(
    pins: Pins,
    traced: Traced,
    backend: BackendReference,
    judged_alike: bool = False,
    alike: Mapping[str, Collection[str]] = {},
) -> Iterator[Remark]:
    """What of a certificate's pins, and of what its kernels loaded, is otherwise here, or was not compared, and why.

    The harness is not, if the one that judged is known to give the verdicts of the one that is here; nor is a source of
    its own of which both digests, by the module's name, are ``alike``.
    """
    own = {builds.source_name(module): builds.module_file(module) for module in backend.modules()}
    # Where a source that is pinned was joined with another, it is gone here, and the other one's name is not pinned.
    joined = any(pin in alike.get(name, ()) and builds.module_file(name) is None for name, pin in pins.sources.items())
    for name, path in own.items():
        if name in pins.sources or path is None:
            continue
        if not joined or builds.source_digest(name, path) not in alike.get(name, ()):
            yield Remark(Weight.AGAINST, f"source {name}: it is the backend's here, and the certificate is of another")
    found = {}
    for name in pins.sources:
        is_module = all(map(str.isidentifier, name.split("."))) and not name.endswith((".py", ".pyc", ".zip"))
        elsewhere = builds.module_file if is_module else partial(find_place, beside=backend.file)
        found[name] = own[name] if name in own else elsewhere(name)
    yield from _absent("sources were", found)
    for name, path in found.items():
        here, stated = builds.source_digest(name, path) if path else pins.sources[name], pins.sources[name]
        if here != stated and not {here, stated} <= {*alike.get(name, ())}:
            yield Remark(Weight.AGAINST, _changed(f"source {path}", stated, here))
    found = {name: find_place(name, backend.file) for name in traced.libraries}
    yield from _absent("shared libraries were", found)
    for name, path in found.items():
        if path is not None:
            yield from _library(name, f"shared library {path}", traced.libraries[name], file_digest(path))
    for name, stated in pins.versions.items():
        yield from _distribution(name, stated, pins.installed.get(name))
    if not judged_alike and (harness_here := _harness_here()).files != pins.harness.files:
        told = ((each.files[:12], each.commit[:12]) for each in (harness_here, pins.harness))
        ours, theirs = (" of commit ".join(filter(None, each)) for each in told)
        changed = ", from a checkout with changes" if pins.harness.clean is False else ""
        yield Remark(Weight.REPORTED, f"judged by the harness {theirs}{changed}; here is {ours}")


def _library(name: str, what: str, stated: str, here: str) -> Iterator[Remark]:
    if stated != here:
        yield Remark(Weight.REPORTED if is_of_the_machine(name) else Weight.AGAINST, _changed(what, stated, here))


def _absent(what: str, found: Mapping[str, Path | None]) -> Iterator[Remark]:
    if absent := [name for name, path in found.items() if path is None]:
        said = f"{len(absent)} of {len(found)} {what} not compared: not here, such as {absent[0]}"
        yield Remark(Weight.REPORTED, said)


def _distribution(name: str, stated: str, pin: builds.Installed | None) -> Iterator[Remark]:
    what, here = f"package {name}", _version(name)
    if pin is None:
        yield Remark(Weight.REPORTED, f"{what} was not compared: the certificate says '{stated}' and no more of it")
    elif here is None:
        yield Remark(Weight.REPORTED, f"{what} {stated} was not compared: it is not installed here")
    elif here != stated:
        yield Remark(Weight.OTHER_BUILD, f"{what} is {here} here, the certificate is of {stated}")
    elif (found := _installed(name)).build != pin.build:
        built = f"{found.build or 'no wheel'} here, the certificate is of {pin.build or 'no wheel'}"
        yield Remark(Weight.OTHER_BUILD, f"{what} {stated} is {built}")
    else:
        for file in sorted({*found.altered} - {*pin.altered}):
            yield Remark(Weight.AGAINST, f"{what}: {file} is not what the wheel brought here")
        if pin.altered:
            yield Remark(Weight.REPORTED, f"{what} was altered where it was judged: {', '.join(pin.altered[:3])}")
        if found.files != pin.files:
            yield Remark(Weight.AGAINST, _changed(what, pin.files, found.files))
        if found.commit != pin.commit:
            yield Remark(Weight.OTHER_BUILD, f"{what} is of commit {found.commit} here, was of {pin.commit}")
        if pin.commit and found.clean is False:
            yield Remark(Weight.AGAINST, f"{what} is a checkout with changes here, which no commit names")


def compare_loaded(traced: Traced, here: Traced) -> Iterator[Remark]:
    for name in sorted(traced.libraries.keys() & here.libraries.keys()):
        yield from _library(name, f"loaded library {name}", traced.libraries[name], here.libraries[name])
    new = sorted(here.libraries.keys() - traced.libraries.keys())
    if traced.libraries and new:
        yield Remark(Weight.REPORTED, f"{len(new)} libraries loaded here are not in the certificate, such as {new[0]}")
    expected = Traced({name: traced.kernels[name] for name in traced.kernels.keys() & here.kernels.keys()}).distinct
    seen = here.distinct
    if expected and not set(traced.distinct) & set(seen):  # of any capability: another case may run another kernel
        ran = f"{seen[0]} and {len(seen) - 1} more" if seen else "none but torch's own"
        yield Remark(Weight.AGAINST, f"kernels: none of those of the certificate ran here, but {ran}")


def compare_machines(stated: Mapping[str, str], here: Mapping[str, str]) -> Iterator[Remark]:
    known = {name: value for name, value in here.items() if name in _OF_A_MACHINE and name in stated}
    if other := [name for name, *_ in differing(known, {name: stated[name] for name in known})]:
        then, now = (", ".join(f"{name} {each.get(name) or 'none'}" for name in other) for each in (stated, here))
        yield Remark(Weight.REPORTED, f"judged with {then}; here: {now}")


@cache
def _installed(name: str) -> builds.Installed:
    return builds.installed(name) or builds.Installed()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # or no name at all
        return None


def _changed(what: str, stated: str, here: str) -> str:
    return f"{what} was changed: the certificate says SHA-256 {stated or 'none'}, here it is {here or 'none'}"
