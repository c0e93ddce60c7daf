"""Floors import downwards only, no backend is named, and each name of the seed documents has a place."""

import ast
import inspect
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import pytest

from mla_conformance.backends.references import known_backends

ROOT = Path(__file__).parents[2]
REFERENCE = "mla_conformance.reference"
FLOORS = {"reference": (REFERENCE,), "backends": (REFERENCE, "mla_conformance.backends")}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "tests" not in path.relative_to(ROOT).parts]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("mla_conformance", *(parts[1:] if parts[0] == "conformance" else parts))
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for floor in ("reference", "backends", "conformance") for path in sources(floor)}
NAMED = re.compile(r"mla_conformance(?:\.\w+)+")
BEGUN = re.compile(r"(mla_conformance(?:\.\w+)+)\.")


@cache
def imported(path: Path) -> set[str]:
    """What a file imports: by statement, wherever it stands, or by a text that names a module or something in one.

    A text that ends behind a package's full stop is the beginning of the name of any module in it.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or "."
            named = {f"{module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= named or {module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {module for text in NAMED.findall(node.value) if (module := meant(text))}
            found |= {begun[1] for begun in [BEGUN.fullmatch(node.value)] if begun} & MODULES.keys()
    return found - {module_of(path)}


def meant(text: str) -> str:
    parts = text.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    return next((name for name in names if name in MODULES and MODULES[name].stem != "__init__"), "")


FOLDERS = [path for floor in ("backends", "conformance") for path in (ROOT / floor).glob("*/__init__.py")]
ROOMS = {str(path.parent.relative_to(ROOT)): path for path in FOLDERS}


def stated(room: str) -> set[str]:
    """The rooms of its floor that a room imports from, as the last paragraph of its description says."""
    description = ast.get_docstring(ast.parse(ROOMS[room].read_text(encoding="utf-8"))) or ""
    law = " ".join(description.split("\n\n")[-1].split())
    names = law.removeprefix("Imports from: ").removesuffix(".").split(", ")
    return set() if law == "Imports from no other room." else {f"{room.split('/')[0]}/{name}" for name in names}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_from_the_rooms_that_it_names(room: str) -> None:
    floor = room.split("/")[0]
    package = {"backends": "mla_conformance.backends.", "conformance": "mla_conformance."}[floor]
    names = {name for path in sources(room) for name in imported(path)}
    assert package.removesuffix(".") not in names, "name the module, not the package that it is taken from"
    others = {f"{floor}/{name.removeprefix(package).split('.')[0]}" for name in names if name.startswith(package)}
    assert others & ROOMS.keys() - {room} == stated(room)


def test_imports_lead_downwards_only_as_the_page_lists_the_rooms() -> None:
    """No module to itself, no room to the commands or the plugin, no floor to one above."""
    imports = {name: imported(path) & MODULES.keys() for name, path in MODULES.items()}
    assert len(list(TopologicalSorter(imports).static_order())) == len(MODULES)
    tops = {"mla_conformance.cli", "mla_conformance.plugin", "mla_conformance.capture", "mla_conformance.distributed"}
    assert [room for room in ROOMS for path in sources(room) if imported(path) & tops] == []
    for floor, below in FLOORS.items():
        for path in sources(floor):
            ours = {name for name in imported(path) if name.startswith("mla_conformance")}
            assert all(name.startswith(below) for name in ours), f"{path.name} imports {ours}"
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = [f"conformance/{name}" for name in re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)]
    assert sorted(listed) == sorted(room for room in ROOMS if room.startswith("conformance"))
    assert all(stated(room) <= set(listed[:place]) for place, room in enumerate(listed))


def test_no_case_test_or_judge_names_a_backend() -> None:
    names = {backend.name for backend in known_backends() if "[" not in backend.name}
    rooms = ("cases", "driving", "judging", "roles", "suite", "vocabulary")
    for path in (path for room in rooms for path in sources(f"conformance/{room}")):
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & {value for value in strings if isinstance(value, str)}, path.name


DOCUMENT = Path(__file__).with_name("seed_names.md").read_text(encoding="utf-8")
NO_PLACE = "no place: "


def places() -> dict[tuple[str, str, str], str]:
    """Where the document puts each name: (seed, class, member) to a target or a reason; a class is its own member."""
    found, seed, key, target = dict[tuple[str, str, str], str](), "", "", ""
    for line in DOCUMENT.splitlines():
        if line.startswith("## "):
            seed = line[3:6]
        elif line.startswith("### "):
            name, _, target = line[4:].replace("`", "").partition(": ")
            key = name if target else name.lower()
            found |= {(seed, key, name): target} if target else {}
        elif line.startswith("Under the same name: "):
            names = re.findall(r"`([^`]+)`", line)
            found |= {(seed, key, member): f"{target}.{member.removesuffix('()')}" for member in names}
        elif row := re.fullmatch(r"\| `([^`]+)` \| (.+) \|", line):
            found[seed, key, row[1]] = row[2].strip("`")
    return found


def test_no_name_was_dropped_and_each_has_a_place_or_a_reason() -> None:
    """The pages of these modules name as many."""
    found = places()
    assert Counter(seed for seed, _, _ in found) == {"000": 46, "001": 27, "002": 116, "003": 15, "004": 118}
    for key, place in found.items():
        if place.startswith(NO_PLACE):
            assert len(place.removeprefix(NO_PLACE).split()) > 2, key
            continue
        owner, _, name = place.rpartition(".")
        found_there = resolve_name(f"mla_conformance.{owner}")
        assert hasattr(found_there, name) or is_instance_attribute(found_there, name), f"{key}: no {place}"


def is_instance_attribute(cls: type, name: str) -> bool:
    ours = [base for base in cls.__mro__ if base.__module__.startswith("mla_conformance.")]
    assigned = re.compile(rf"self\.{name}\b[^\n=]*=[^=]")
    return any(name in inspect.get_annotations(base) or assigned.search(inspect.getsource(base)) for base in ours)
