"""The laws of the house: floors, rooms and modules import downwards only; nothing outside a backend's file names it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mla_conformance.backends.references import known_backends

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "reference": "mla_conformance.reference",
    "backends": "mla_conformance.backends",
    "conformance": "mla_conformance",
}
FLOORS = {
    "reference": ("mla_conformance.reference",),
    "backends": ("mla_conformance.reference", "mla_conformance.backends"),
}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "tests" not in path.parts]


def module_of(path: Path) -> str:
    floor, *inside = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[floor], *(part for part in inside if part != "__init__")])


MODULES = {module_of(path): path for floor in PACKAGES for path in sources(floor)}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES.values()}
ROOMS = {
    f"{floor}/{path.parent.name}": path
    for floor in ("backends", "conformance")
    for path in (ROOT / floor).glob("*/__init__.py")
}


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, for type checkers as well."""
    nodes = list(ast.walk(TREES[path]))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            taken = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= (taken & MODULES.keys()) or {node.module or "."}
    return modules


def named(path: Path) -> Iterator[str]:
    """The modules that a file names in strings: to import them later, to start them, or as the path of a class."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Constant) and str(node.value).startswith("mla_conformance."):
            name = str(node.value).replace(":", ".")
            while name not in MODULES:
                name = name.rpartition(".")[0]
            yield name


def stated(room: str) -> set[str]:
    """The rooms of its floor that a room imports from, as the last line of its description says."""
    description = ast.get_docstring(TREES[ROOMS[room]]) or ""
    law = description.splitlines()[-1]
    names = law.removeprefix("Imports from: ").removesuffix(".").split(", ")
    return set() if law == "Imports from no other room." else {f"{room.split('/')[0]}/{name}" for name in names}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_from_the_rooms_that_it_names(room: str) -> None:
    names = {name for path in sources(room) for name in [*imported(path), *named(path)]} & MODULES.keys()
    others = {"/".join(MODULES[name].relative_to(ROOT).parts[:2]) for name in names} & ROOMS.keys() - {room}
    assert {other for other in others if other.startswith(room.partition("/")[0])} == stated(room)


def test_the_rooms_stand_in_an_order() -> None:
    assert set(TopologicalSorter({room: stated(room) for room in ROOMS}).static_order()) == ROOMS.keys()


def test_the_modules_stand_in_an_order() -> None:
    below = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    assert set(TopologicalSorter(below).static_order()) == MODULES.keys()


def test_no_room_imports_the_commands_or_the_plugin() -> None:
    tops = {f"mla_conformance.{name}" for name in ("cli", "plugin", "capture", "captured")}
    assert [path for room in ROOMS for path in sources(room) if {*imported(path), *named(path)} & tops] == []


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_from_below_only(floor: str) -> None:
    for path in sources(floor):
        ours = {name for name in [*imported(path), *named(path)] if name.startswith("mla_conformance")}
        assert all(name.startswith(FLOORS[floor]) for name in ours), f"{path.name} imports {ours}"


def test_dimensions_and_chunking_and_the_vocabulary_need_no_torch() -> None:
    for name in (
        "reference/dimensions.py",
        "reference/chunking.py",
        *(f"conformance/cases/{name}.py" for name in ("case", "grammar", "cached", "prefill", "decode", "layer")),
        "conformance/cases/capabilities.py",
    ):
        assert "torch" not in imported(ROOT / name), name


def test_records_and_reports_are_read_and_judged_without_torch() -> None:
    rooms = [path for room in ("report", "gating", "expectations", "files") for path in sources(f"conformance/{room}")]
    rooms += [ROOT / "conformance" / "judging" / f"{name}.py" for name in ("record", "verdict", "backend_facts")]
    names = [f"mla_conformance.{path.parent.name}.{path.stem}" for path in rooms if path.stem != "__init__"]
    code = "".join(f"import {name}\n" for name in names) + "import sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_case_test_or_judge_names_a_backend() -> None:
    names = {backend.name for backend in known_backends() if "[" not in backend.name}
    files = [path for room in ("cases", "driving", "judging", "suite") for path in sources(f"conformance/{room}")]
    for path in files:
        strings = {node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant)}
        assert not names & {value for value in strings if isinstance(value, str)}, path.name
