"""What an environment's Python finds of distributions: ``python -m mla_conformance.bump.found NAME...`` prints it."""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import msgspec


class Found(msgspec.Struct, frozen=True):
    """A distribution as it is found.

    Attributes:
        version: of it; empty if it is not installed.
        elsewhere: its modules that an import would take from another place, each with that place.
    """

    version: str = ""
    elsewhere: dict[str, str] = {}


def find(names: Sequence[str]) -> dict[str, Found]:
    """What is found of each distribution, in this process; nothing of them is imported."""
    return {name: _find(name) for name in names}


def _find(name: str) -> Found:
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return Found()
    taken = {module: (_origin(module), path) for module, path in _modules(installed)}
    return Found(installed.version, {module: origin for module, (origin, path) in taken.items() if origin != path})


def _modules(installed: Distribution) -> Iterator[tuple[str, str]]:
    """The modules and packages at the top of a distribution, each with its file."""
    for file in installed.files or ():
        top, *rest = file.parts
        if rest == ["__init__.py"] or (not rest and file.suffix == ".py"):
            yield Path(top).stem, str(Path(str(installed.locate_file(file))).resolve())


def _origin(module: str) -> str:
    """The file that an import of a module at the top would take."""
    found = find_spec(module)
    return str(Path(found.origin).resolve()) if found and found.origin else ""


if __name__ == "__main__":
    print(msgspec.json.encode(find(sys.argv[1:])).decode())  # noqa: T201 - for the process that asked
