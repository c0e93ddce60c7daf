"""The library behind an adapter: whether it is installed, which imports nothing, whether it imports, its version."""

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from types import ModuleType

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


@dataclass(frozen=True)
class Library:
    """An importable module and the distribution that brings it."""

    module: str  # what the adapter imports
    distribution: str  # name on the package index
    command: str  # how to install it
    note: str = ""  # what a user should know before trying, or empty
    other: "Library | None" = None  # a build that does as well, taken where it is installed and this one is not

    def found(self) -> "Library":
        return self.other if self.other and not _installed(self.module) and _installed(self.other.module) else self

    def missing(self) -> list[str]:
        """Why it is not installed, with the command that installs it; empty if it is. Imports nothing."""
        said = f"package {self.distribution} not installed ({self.command})" + (f"; {self.note}" if self.note else "")
        return [] if _installed(self.module) else [said]

    def broken(self) -> list[str]:
        """Why an installed library does not import; empty if it does, or if it is not installed."""
        try:
            if _installed(self.module):
                self.load()
        except Exception as error:  # a library may raise anything while it loads its shared objects
            said = f"{self.module} does not import: {type(error).__name__}: {error}"
            if "never tried" in (found := self.version()):
                said += f"; the installed version is {found}"
            return [f"package {self.distribution} is installed, but {said}"]
        return []

    def load(self) -> ModuleType:
        return import_module(self.module)

    def version(self) -> str:
        """Version of the distribution, and that it was never tried if it was not; or that it has none."""
        return _version(self.distribution)


@cache
def _version(distribution: str) -> str:
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return "not installed as a distribution"
    try:
        extras = map(Requirement, requires("mla-conformance") or [])
    except PackageNotFoundError:
        return found
    # The range of versions in this project's extras, empty if the distribution is in none.
    name = canonicalize_name(distribution)
    tried = next((each.specifier for each in extras if canonicalize_name(each.name) == name), SpecifierSet())
    return found if tried.contains(found, prereleases=True) else f"{found}, never tried ({distribution}{tried} was)"


def _installed(module: str) -> bool:
    """Whether ``module`` can be found, without importing its parent packages as ``find_spec`` would."""
    if module in sys.modules:
        return True
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # a module in sys.modules without a spec
        return True
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        # By its last name alone: of a folder without ``__init__.py`` its parent would be asked, which is not imported.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec is not None
