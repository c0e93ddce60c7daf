"""A library in one exact version: as a person names it, ``flashinfer-python==0.6.13``, and as an environment has it.

``python -m mla_conformance.bump.version NAME...`` prints what that Python finds of these distributions.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import InvalidVersion, Version

from mla_conformance.files.whole import InputError


@dataclass(frozen=True)
class Pin:
    requirement: str  # what pip installs
    name: NormalizedName  # of the distribution, in its canonical form
    version: str  # as it was asked for

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @staticmethod
    def parse(text: str) -> "Pin":
        try:
            found = Requirement(text)
        except InvalidRequirement:
            found = Requirement("nothing")
        versions = [each.version for each in found.specifier if each.operator == "==" and "*" not in each.version]
        if len(versions) != 1 or len(found.specifier) != 1 or found.url or found.marker:
            raise InputError(f"expected NAME==VERSION such as flashinfer-python==0.6.13, got {text!r}")
        return Pin(text, canonicalize_name(found.name), versions[0])

    def admits(self, version: str) -> bool:
        """Whether an installed version is the one asked for; a local label such as ``+cu130`` may be left out."""
        try:
            return Requirement(self.requirement).specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:  # what stands in a report for a distribution that is not installed
            return False


def two_versions(before: str, after: str) -> tuple[Pin, Pin]:
    old, new = Pin.parse(before), Pin.parse(after)
    if old.name != new.name:
        raise InputError(f"expected two versions of one library, got {old.name} and {new.name}")
    if old.admits(new.version) or new.admits(old.version):
        raise InputError(f"expected two different versions of {old.name}, got {old.version} and {new.version}")
    return old, new


class Found(msgspec.Struct, frozen=True):
    version: str = ""  # of it; empty if it is not installed
    elsewhere: dict[str, str] = {}  # its modules that an import would take from another place, each with that place


def find(names: Sequence[str]) -> dict[str, Found]:
    found = {}
    for name in names:
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            found[name] = Found()
            continue
        elsewhere = {}
        for file in installed.files or ():
            top, *rest = file.parts
            if rest == ["__init__.py"] or (not rest and file.suffix == ".py"):  # modules and packages at its top
                module, spec = Path(top).stem, find_spec(Path(top).stem)
                origin = str(Path(spec.origin).resolve()) if spec and spec.origin else ""
                if origin != str(Path(str(installed.locate_file(file))).resolve()):
                    elsewhere[module] = origin
        found[name] = Found(installed.version, elsewhere)
    return found


if __name__ == "__main__":
    print(msgspec.json.encode(find(sys.argv[1:])).decode())  # noqa: T201 - for the process that asked
