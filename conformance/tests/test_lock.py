"""The verdict lock: two of one machine are compared row by row, others are refused, and digests are listed only then."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.certificate.digests import LOCKED, installed_digests, locked_digests

CI = Path(__file__).parents[2] / "ci"
RECORD = CI.parent / "submissions" / "2026.4" / "TORCH_SDPA" / "record.json"
HEADER = {"cpu": "one", "torch": "2.13", "threads": 1, "small": False, "digests": installed_digests()}
ROW = {"case": "lse:q=[64]", "kernel": "EAGER", "status": "pass", "used": {"lse": "0.1"}}


def written(path: Path, header: dict[str, Any], *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)), encoding="utf-8")
    return path


def run(script: str, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CI / script, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("header", "rows", "status", "said"),
    [
        ({}, [ROW], 0, "1 rows, 0 different"),
        ({}, [{**ROW, "used": {"lse": "0.10000000000000002"}}], 1, "lse:q=[64] EAGER: used {'lse': '0.1'} -> "),
        ({}, [], 1, "lse:q=[64] EAGER: is missing in one"),
        ({"cpu": "another"}, [ROW], 2, "expected two locks of one machine, got cpu: 'one' and 'another'"),
        ({"torch": "2.14", "threads": 2}, [ROW], 2, "torch: '2.13' and '2.14'; threads: 1 and 2"),
    ],
)
def test_two_locks_are_compared_to_the_last_digit(
    header: dict[str, Any], rows: list[dict[str, Any]], status: int, said: str, tmp_path: Path
) -> None:
    before = written(tmp_path / "before", HEADER, ROW)
    found, printed = run("lock.py", "compare", before, written(tmp_path / "after", {**HEADER, **header}, *rows))
    assert found == status and said in printed


def test_nothing_is_listed_without_equal_locks_and_four_records(tmp_path: Path) -> None:
    listed = {**HEADER, "digests": {name: locked_digests()[name][0] for name in LOCKED}}
    same = written(tmp_path / "same", HEADER, ROW)
    status, printed = run("accept.py", written(tmp_path / "before", listed, ROW), same, RECORD)
    assert status == 1 and "expected records of 4 kernels or more, got 1" in printed
    unknown = written(tmp_path / "unknown", {**HEADER, "digests": dict.fromkeys(LOCKED, "0" * 64)}, ROW)
    status, printed = run("accept.py", unknown, same, RECORD)
    assert status == 1 and f"'judging' of suite 2026.4: expected one of {locked_digests()['judging'][0]}" in printed
