"""The records of real kernels that were handed in: they verify, lose nothing as lines, and are shown as they are."""

import importlib.util
from pathlib import Path

import pytest

from mla_conformance.certificate.certificate import RECORDS
from mla_conformance.certificate.digests import seal
from mla_conformance.certificate.records import change_records, kept_records, read_records
from mla_conformance.cli import main
from mla_conformance.version import SUITE_VERSION

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "fixtures" / "records").glob("*.jsonl"))

spec = importlib.util.spec_from_file_location("ci_matrix", ROOT / "ci" / "matrix.py")
assert spec is not None and spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)


def test_readme_and_findings_show_the_records() -> None:
    for section, content in matrix.sections(ROOT):
        assert section.content.strip() == content, "run: python ci/matrix.py"


def test_the_records_of_this_suite_verify(capsys: pytest.CaptureFixture[str]) -> None:
    if not (ROOT / RECORDS).exists():
        pytest.skip(f"no record of suite {SUITE_VERSION} has been handed in yet")
    assert main(["verify", str(ROOT / RECORDS)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_that_are_written_anew_are_the_same(path: Path, tmp_path: Path) -> None:
    """Every one of them read, packed into another file and read again, down to its seal."""
    lines, again = read_records(path), tmp_path / path.name
    records = [line.kept for line in lines if line.kept]
    assert len(records) == len(lines) and all(each.certificate.seal == seal(each.certificate) for each in records)
    change_records(again, lambda _: records)
    assert kept_records(again) == records
    assert again.read_bytes() == path.read_bytes()
