"""The committed records of real kernels: what the README says of them is what they say."""

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest

from mla_conformance.report.counts import Counts

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "ci" / "certificates").rglob("*.json"))

spec = importlib.util.spec_from_file_location("ci_matrix", ROOT / "ci" / "matrix.py")
assert spec is not None and spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)


def test_readme_shows_the_records() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert matrix.rewrite(readme) == readme, "run: python ci/matrix.py README.md"


def test_a_readme_without_the_section_is_refused() -> None:
    with pytest.raises(ValueError, match="h200:begin"):
        matrix.rewrite("# mla-conformance\n")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_adds_up(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, capability in record["capabilities"].items():
        counts = msgspec.structs.asdict(msgspec.convert(capability, Counts))
        assert counts.pop("listed") == sum(counts.values()), name
        assert len(capability["failures"]) == capability["failed"], name
    assert record["environment"]["device"] and record["versions"]
    assert record["emulated"] or record["evidence"]
