"""What a certificate is tied to beside what is here: the same, another build of it, or something that was changed."""

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from mla_conformance.backends.references import BackendReference
from mla_conformance.certificate.pins import Pins, harness
from mla_conformance.files.installed import Installed, file_digest, installed, module_file, source_digest, source_name
from mla_conformance.files.places import find_place, is_of_the_machine
from mla_conformance.judging.record import Traced

_OF_A_MACHINE = ("device", "compute_capability", "driver", "cuda", "cudnn", "torch", "python")


class Weight(Enum):
    """What a finding means."""

    AGAINST = "against"
    """The certificate is not of what is here, although it names the same."""
    OTHER_BUILD = "other build"
    """Here is another build, which the certificate says nothing of."""
    REPORTED = "reported"
    """Not compared, or may differ between machines by rights."""


class Remark(NamedTuple):
    """One sentence on a certificate beside this machine."""

    weight: Weight
    sentence: str


def compare(pins: Pins, traced: Traced, backend: BackendReference, judged_alike: bool = False) -> Iterator[Remark]:
    """What of a certificate's pins is otherwise here, and what could not be compared, and why.

    Args:
        pins: what the certificate is tied to.
        traced: what its kernels were seen to run and to load.
        backend: the backend as it is named here.
        judged_alike: the harness that judged is known to give the verdicts of the one that is here.
    """
    yield from _sources(pins, backend)
    yield from _libraries(traced.libraries, backend)
    for name, stated in pins.versions.items():
        yield from _distribution(name, stated, pins.installed.get(name))
    if not judged_alike:
        yield from _harness(pins.harness)


def _sources(pins: Pins, backend: BackendReference) -> Iterator[Remark]:
    own = {source_name(module): module_file(module) for module in backend.modules()}
    for name, path in own.items():
        if name not in pins.sources and path is not None:
            yield Remark(Weight.AGAINST, f"source {name}: it is the backend's here, and the certificate is of another")
    found = {name: own[name] if name in own else _source(name, backend) for name in pins.sources}
    yield from _absent("sources were", found)
    for name, path in found.items():
        if path is not None and (here := source_digest(name, path)) != pins.sources[name]:
            yield Remark(Weight.AGAINST, _changed(f"source {path}", pins.sources[name], here))


def _source(name: str, backend: BackendReference) -> Path | None:
    """The file of a module, by its name or, where it was only seen to be loaded, by its place."""
    is_module = all(part.isidentifier() for part in name.split(".")) and not name.endswith((".py", ".pyc", ".zip"))
    return module_file(name) if is_module else find_place(name, backend.file)


def _libraries(libraries: Mapping[str, str], backend: BackendReference) -> Iterator[Remark]:
    found = {name: find_place(name, backend.file) for name in libraries}
    yield from _absent("shared libraries were", found)
    for name, path in found.items():
        if path is not None:
            yield from _library(name, f"shared library {path}", libraries[name], file_digest(path))


def _library(name: str, what: str, stated: str, here: str) -> Iterator[Remark]:
    if stated != here:
        yield Remark(Weight.REPORTED if is_of_the_machine(name) else Weight.AGAINST, _changed(what, stated, here))


def _absent(what: str, found: Mapping[str, Path | None]) -> Iterator[Remark]:
    absent = [name for name, path in found.items() if path is None]
    if absent:
        yield Remark(
            Weight.REPORTED, f"{len(absent)} of {len(found)} {what} not compared: not here, such as {absent[0]}"
        )


def compare_loaded(traced: Traced, here: Traced) -> Iterator[Remark]:
    """What a certificate's backend was seen to run and to load, beside what it runs and loads here."""
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


def _distribution(name: str, stated: str, pin: Installed | None) -> Iterator[Remark]:
    here = _version(name)
    if pin is None:
        yield Remark(
            Weight.REPORTED, f"package {name} was not compared: the certificate says '{stated}' and no more of it"
        )
    elif here is None:
        yield Remark(Weight.REPORTED, f"package {name} {stated} was not compared: it is not installed here")
    elif here != stated:
        yield Remark(Weight.OTHER_BUILD, f"package {name} is {here} here, the certificate is of {stated}")
    elif (found := _installed(name)).build != pin.build:
        built = f"{found.build or 'no wheel'} here, the certificate is of {pin.build or 'no wheel'}"
        yield Remark(Weight.OTHER_BUILD, f"package {name} {stated} is {built}")
    else:
        yield from _files(name, pin, found)


def _files(name: str, pin: Installed, found: Installed) -> Iterator[Remark]:
    """Of one version, built for one platform."""
    for file in sorted({*found.altered} - {*pin.altered}):
        yield Remark(Weight.AGAINST, f"package {name}: {file} is not what the wheel brought here")
    if pin.altered:
        yield Remark(Weight.REPORTED, f"package {name} was altered where it was judged: {', '.join(pin.altered[:3])}")
    if found.files != pin.files:
        yield Remark(Weight.AGAINST, _changed(f"package {name}", pin.files, found.files))
    if found.commit != pin.commit:
        yield Remark(Weight.OTHER_BUILD, f"package {name} is of commit {found.commit} here, was of {pin.commit}")
    if pin.commit and found.clean is False:
        yield Remark(Weight.AGAINST, f"package {name} is a checkout with changes here, which no commit names")


def _harness(pin: Installed) -> Iterator[Remark]:
    here = _harness_here()
    if here.files != pin.files:
        ours, theirs = (" of commit ".join(filter(None, (each.files[:12], each.commit[:12]))) for each in (here, pin))
        changed = ", from a checkout with changes" if pin.clean is False else ""
        yield Remark(Weight.REPORTED, f"judged by the harness {theirs}{changed}; here is {ours}")


def compare_machines(stated: Mapping[str, str], here: Mapping[str, str]) -> Iterator[Remark]:
    """Where a run took place beside this machine, as far as ``here`` tells."""
    other = [name for name in here if name in _OF_A_MACHINE and stated.get(name, here[name]) != here[name]]
    if other:
        then, now = (", ".join(f"{name} {each.get(name) or 'none'}" for name in other) for each in (stated, here))
        yield Remark(Weight.REPORTED, f"judged with {then}; here: {now}")


_harness_here = cache(harness)


@cache
def _installed(name: str) -> Installed:
    """What is installed of a distribution; read once, for however many certificates."""
    return installed(name) or Installed()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # or no name at all
        return None


def _changed(what: str, stated: str, here: str) -> str:
    return f"{what} was changed: the certificate says SHA-256 {stated or 'none'}, here it is {here or 'none'}"
