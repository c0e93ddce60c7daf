"""The submitted records of real kernels verify, and are shown as they are."""

import importlib.util
from pathlib import Path

import pytest

from mla_conformance.cli import main
from mla_conformance.files.inputs import InputError
from mla_conformance.version import SUITE_VERSION

ROOT = Path(__file__).parents[2]

spec = importlib.util.spec_from_file_location("ci_matrix", ROOT / "ci" / "matrix.py")
assert spec is not None and spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)


def test_readme_and_findings_show_the_records() -> None:
    for section, content in matrix.sections(ROOT):
        assert section.content.strip() == content, "run: python ci/matrix.py"


def test_a_readme_without_the_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# mla-conformance\n")
    with pytest.raises(InputError, match="h200:begin"):
        matrix.sections(tmp_path)


def test_the_records_of_this_suite_verify(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "submissions" / SUITE_VERSION
    if not folder.exists():
        pytest.skip(f"no record of suite {SUITE_VERSION} has been handed in yet")
    assert main(["verify", str(folder)]) == 0, capsys.readouterr().err
