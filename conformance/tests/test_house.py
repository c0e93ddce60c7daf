"""The laws of the house: floors import downwards only, and nothing outside a backend's file names the backend."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mla_conformance.backends.loading import known_backends

ROOT = Path(__file__).parents[2]
FLOORS = {
    "reference": ("mla_conformance.reference",),
    "backends": ("mla_conformance.reference", "mla_conformance.backends"),
}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "tests" not in path.parts]


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return modules | {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}


ROOMS = sorted(path.parent for path in (ROOT / "conformance").glob("*/__init__.py"))


def stated(room: Path) -> set[str]:
    """The rooms that a room imports from, as the last line of its description says."""
    description = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    law = description.splitlines()[-1]
    return set() if law == "Imports from no other room." else set(law.removeprefix("Imports from: ")[:-1].split(", "))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_imports_from_the_rooms_that_it_names(room: Path) -> None:
    names = {name for path in sources(f"conformance/{room.name}") for name in imported(path)}
    ours = {name.split(".")[1] for name in names if name.startswith("mla_conformance.")}
    assert "mla_conformance" not in names, "name the module, not the package that it is taken from"
    assert ours - {room.name, "reference", "backends", "fixtures", "version"} == stated(room)


def test_the_rooms_stand_in_an_order() -> None:
    order = list(TopologicalSorter({room.name: stated(room) for room in ROOMS}).static_order())
    assert sorted(order) == [room.name for room in ROOMS]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_from_below_only(floor: str) -> None:
    for path in sources(floor):
        ours = {name for name in imported(path) if name.startswith("mla_conformance")}
        assert all(name.startswith(FLOORS[floor]) for name in ours), f"{path.name} imports {ours}"


def test_dimensions_and_chunking_and_the_vocabulary_need_no_torch() -> None:
    for name in (
        "reference/dimensions.py",
        "reference/chunking.py",
        "conformance/cases/case.py",
        "conformance/cases/capabilities.py",
    ):
        assert "torch" not in imported(ROOT / name), name


def test_no_case_test_or_judge_names_a_backend() -> None:
    names = {backend.name for backend in known_backends() if "[" not in backend.name}
    files = [path for room in ("cases", "driving", "judging", "suite") for path in sources(f"conformance/{room}")]
    for path in files:
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & {value for value in strings if isinstance(value, str)}, path.name
