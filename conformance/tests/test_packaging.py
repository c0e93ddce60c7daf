"""The wheel holds what the checkout holds, and works without it."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from mla_conformance.cases.capabilities import Tier, find_capability

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"


def shipped_files() -> Iterator[tuple[str, Path]]:
    """Every file of the packages in the checkout: (package that the folder is mapped to, path within the folder)."""
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if path.is_file() and not {"tests", "__pycache__"} & set(inside.parts):
                yield package, inside


def run(command: list[str | Path], folder: Path, environment: dict[str, str] | None = None) -> str:
    environment = {**os.environ, **(environment or {})}
    finished = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A wheel built from a copy, since setuptools would ship what an earlier build left in the checkout."""

    def build(folder: Path) -> None:
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder / name)
        for name in FOLDERS.values():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        run([sys.executable, "-c", BUILD], folder)

    (built,) = once("wheel", build).glob("*.whl")
    return built


def test_every_folder_of_code_is_a_listed_package() -> None:
    found = {".".join([package, *path.parts[:-1]]) for package, path in shipped_files() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(FOLDERS.values())


def test_the_wheel_holds_every_file_and_no_other(wheel: Path) -> None:
    expected = {f"{package.replace('.', '/')}/{path.as_posix()}" for package, path in shipped_files()}
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sorted(packed) == sorted(expected)


def test_the_suite_runs_from_the_wheel_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    ZipFile(wheel).extractall(site)
    selected = ["--backend", "TORCH_SDPA", "--mla-capability", "lse", "--mla-tier", "smoke", "--mla-device", "cpu"]
    suite = [sys.executable, "-m", "pytest", "--trace-config", "--pyargs", "mla_conformance.suite", *selected]
    passed = f"{len(find_capability('lse').select(Tier.SMOKE))} passed"
    printed = run([*suite], elsewhere, {"PYTHONPATH": str(site)})
    assert f"{site}/mla_conformance/plugin.py" in printed and passed in printed
