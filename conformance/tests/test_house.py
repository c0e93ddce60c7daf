"""The laws of the house: floors import downwards only, and nothing outside a backend's file names the backend."""

import ast
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


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_from_below_only(floor: str) -> None:
    for path in sources(floor):
        ours = {name for name in imported(path) if name.startswith("mla_conformance")}
        assert all(name.startswith(FLOORS[floor]) for name in ours), f"{path.name} imports {ours}"


def test_dimensions_and_chunking_and_the_vocabulary_need_no_torch() -> None:
    for name in (
        "reference/dimensions.py",
        "reference/chunking.py",
        "conformance/case.py",
        "conformance/capabilities.py",
    ):
        assert "torch" not in imported(ROOT / name), name


def test_no_case_test_or_judge_names_a_backend() -> None:
    names = {backend.name for backend in known_backends() if "[" not in backend.name}
    files = [*sources("conformance/suite"), *(ROOT / "conformance" / f"{name}.py" for name in ("caselists", "judge"))]
    files += [ROOT / "conformance" / f"{name}.py" for name in ("capabilities", "hazards", "diagnosis", "driver")]
    for path in files:
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not names & {value for value in strings if isinstance(value, str)}, path.name
