"""The committed records of real kernels: one list, verified by the suite, and shown as they are."""

import datetime
import importlib.util
from pathlib import Path

import pytest

from mla_conformance.certificate.certificate import read_certificate
from mla_conformance.certificate.verify import problems
from mla_conformance.files.inputs import InputError
from mla_conformance.version import SUITE_VERSION

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "ci" / "certificates").rglob("*.json"))

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


def test_the_records_are_of_one_suite() -> None:
    assert len({read_certificate(path).suite for path in RECORDS}) == 1


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_holds(path: Path) -> None:
    """Under the suite that issued it; another one says which that is, and nothing more."""
    certificate = read_certificate(path)
    found = problems(certificate, datetime.date.today())
    if certificate.suite == SUITE_VERSION:
        assert found == []
    else:
        assert (
            f"suite {certificate.suite}: this is {SUITE_VERSION}; install the suite that issued it to verify it"
            in found
        )
    assert certificate.clean_tree is not False
