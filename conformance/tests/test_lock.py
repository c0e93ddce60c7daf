"""The verdict lock, and the records of real kernels that were handed in: they verify and lose nothing as lines."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_conformance.certificate.certificate import RECORDS
from mla_conformance.certificate.records import change_records, kept_records, read_records
from mla_conformance.certificate.verify import LOCKED, SOURCES, locked_digests, seal
from mla_conformance.cli import main
from mla_conformance.files.installed import meaning
from mla_conformance.tests.reports import script
from mla_conformance.version import SUITE_VERSION

ROOT = Path(__file__).parents[2]
RECORDS_FILE = ROOT / RECORDS
of_this_suite = pytest.mark.skipif(not RECORDS_FILE.exists(), reason=f"no record of suite {SUITE_VERSION} is here yet")
HEADER = {"cpu": "one", "torch": "2.13", "threads": 1, "small": False, "digests": dict.fromkeys(LOCKED, "")}
ROW = {"case": "lse:q=[64]", "kernel": "EAGER", "status": "pass", "used": {"lse": "0.1"}}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("header", "rows", "status", "said"),
    [
        ({}, [ROW], 0, "1 rows, 0 different"),
        ({}, [{**ROW, "used": {"lse": "0.10000000000000002"}}], 1, "lse:q=[64] EAGER: used {'lse': '0.1'} -> "),
        ({}, [{**ROW, "message": "lse off"}], 0, "1 rows, 1 different, 1 of them in messages alone"),
        ({}, [{**ROW, "message": "lse off", "status": "fail"}], 1, "1 rows, 1 different, 0 of them in messages alone"),
        ({}, [{**ROW, "kernel": "TORCH_SDPA"}], 1, "lse:q=[64] EAGER: is missing in one"),
        ({}, [ROW, {**ROW, "case": "lse:q=[65]"}], 0, "0 of them in messages alone, 1 of cases that were added"),
        ({}, [{**ROW, "case": "lse:q=[65]"}], 1, "lse:q=[64] EAGER: is missing in one"),
        ({"cpu": "another"}, [ROW], 2, "expected two locks of one machine, got cpu: 'one' and 'another'"),
        ({"torch": "2.14", "threads": 2}, [ROW], 2, "torch: '2.13' and '2.14'; threads: 1 and 2"),
    ],
)
def test_two_locks_are_compared_to_the_last_digit(
    header: dict[str, Any], rows: list[dict[str, Any]], status: int, said: str, tmp_path: Path, capsys: Any
) -> None:
    before, after = written(tmp_path / "before", HEADER, ROW), written(tmp_path / "after", {**HEADER, **header}, *rows)
    assert script("lock").compare(before, after) == status
    assert said in "".join(capsys.readouterr())


@of_this_suite
def test_nothing_is_listed_without_equal_locks_and_four_records(tmp_path: Path) -> None:
    accept = script("accept")
    listed = {**HEADER, "digests": {name: locked_digests()[name][0] for name in LOCKED}}
    records = [tmp_path / "record.json"]
    records[0].write_bytes(msgspec.json.encode(kept_records(RECORDS_FILE)[0].certificate))
    same = written(tmp_path / "same", HEADER, ROW)
    known = list(accept.problems(written(tmp_path / "before", listed, ROW), same, records))
    assert any("expected records of 4 kernels or more, got 1" in problem for problem in known)
    unknown = written(tmp_path / "unknown", {**HEADER, "digests": dict.fromkeys(LOCKED, "0" * 64)}, ROW)
    said = f"'judging' of suite {SUITE_VERSION}: expected one of {locked_digests()['judging'][0]}"
    assert any(said in problem for problem in accept.problems(unknown, same, records))


STORED = json.loads((files("mla_conformance.fixtures") / "suites.json").read_text())
DO = (
    "sources that decide verdicts have changed since this version was stored: show by ci/lock.py and ci/accept.py that "
    "verdicts are as before, or raise conformance/version.py if there are records of it, and run ci/suite_version.py; "
    "a case that was added to a list has the version that does behind it, such as +2026.11.1"
)


def test_this_version_is_what_was_stored_of_its_code_without_comments() -> None:
    here, stored = script("suite_version").version_digests(), STORED[SUITE_VERSION]
    latest = {name: digests for name, digests in stored.items() if name != SOURCES}
    assert {**latest, **{name: stored[name][-1:] for name in LOCKED}} == here, DO
    same = '"""A module."""\ndef f(x):\n\n    return (x+1)\n\n"""Of no use."""\n'
    others = ("(x):\n    return x + 2\n", "(x):\n    return x + 1.0\n", "(x, y=None):\n    return x + 1\n")
    assert repr(meaning(same)) == repr(meaning(CODE)) not in [repr(meaning(f"def f{other}")) for other in others]
    assert meaning("a = 1  # why\n", ".toml") == {"a": 1}


CODE = 'def f(x):\n    """It adds."""\n    return x + 1  # one\n'

FILES = sorted((ROOT / "fixtures" / "records").glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_records_that_were_handed_in_verify_and_stay(path: Path, tmp_path: Path, capsys: Any) -> None:
    """Those of an earlier suite, too, for what they judged: every fourth, among them one of a patch."""
    lines, again = read_records(path), tmp_path / path.name
    records = [line.kept for line in lines if line.kept]
    assert len(records) == len(lines) and all(each.certificate.seal == seal(each.certificate) for each in records)
    again.write_bytes(path.read_bytes())  # lines that were packed by a shorter list stay as they are
    change_records(again, lambda found: found)
    assert again.read_bytes() == path.read_bytes()
    if path != RECORDS_FILE:
        head, *lines_of_file = path.read_text("utf-8").splitlines(keepends=True)
        again.write_text(head + "".join(lines_of_file[3::4]), "utf-8")
    assert main(["verify", str(again)]) == 0, capsys.readouterr().err
