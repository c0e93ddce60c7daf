"""The Python files that a module is made of, found by what they import and without importing anything."""

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mla_conformance.files.installed import file_digest
from mla_conformance.files.meaning import meaning_digest
from mla_conformance.files.places import is_file, sites

_HARNESS = "mla_conformance."
_ADAPTERS = "mla_conformance.backends."


def source_digests(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 of these modules and of what they import that no wheel holds, by name.

    Of the harness only its adapters are followed: its other files have digests of their own, and those of a wheel the
    digest of the wheel. What the harness says counts, and of any other file every byte.

    Args:
        modules: names of modules; a file that is no module of a package by its path.
    """
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        name = left.pop()
        path = module_file(name)
        if path is not None and path.suffix == ".py" and source_name(name) not in found:
            found[source_name(name)] = source_digest(name, path)
            left += filter(_is_followed, [*_imported(name, path), *_packages(name)])
    return dict(sorted(found.items()))


def source_name(module: str) -> str:
    """What a module is called on every machine: its name, or that of its file."""
    return Path(module).name if module.endswith(".py") else module


def source_digest(module: str, path: Path) -> str:
    """SHA-256 of a module: of the harness what it says, of any other its bytes."""
    return meaning_digest([path]) if module.startswith(_HARNESS) else file_digest(path)


def module_file(name: str) -> Path | None:
    """The file of a module, which is not imported, nor is a package that it is in; None if there is none."""
    if name.endswith(".py"):
        return Path(name) if is_file(Path(name)) else None
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except ValueError:  # a module in sys.modules without a spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name, locations = f"{spec.name}.{part}", list(spec.submodule_search_locations)
        # An editable installation of the harness finds its folders in a way of its own; its packages are imported here.
        spec = find_spec(name) if name.startswith(_HARNESS) else PathFinder.find_spec(name, locations)
    path = Path(spec.origin) if spec and spec.origin else None
    return path if path and is_file(path) else None


def _is_followed(name: str) -> bool:
    """Whether a module is none of a wheel, and of the harness only if it is one of its adapters."""
    if name.startswith(_HARNESS):
        return name.startswith(_ADAPTERS)
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == _HARNESS[:-1]:
        return False
    path = module_file(name)
    return path is not None and not any(path.resolve().is_relative_to(site) for site in sites())


def _packages(name: str) -> list[str]:
    """The packages that a module is in, which are imported before it."""
    parts = [] if name.endswith(".py") else name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _imported(name: str, path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, wherever the statement stands, and of what it takes from packages."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
