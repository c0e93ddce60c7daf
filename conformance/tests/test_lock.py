"""The verdict lock: two of one machine are compared row by row, others refused, and digests listed only then.

A suite version stands for one list, one tolerance, one specification and one judge.
"""

import importlib
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mla_conformance.certificate.certificate import RECORDS, Certificate
from mla_conformance.certificate.digests import (
    EARLIER,
    LOCKED,
    SOURCES,
    installed_digests,
    locked_digests,
    version_digests,
)
from mla_conformance.certificate.records import kept_records
from mla_conformance.version import SUITE_VERSION

CI = Path(__file__).parents[2] / "ci"
RECORDS_FILE = CI.parent / RECORDS
of_this_suite = pytest.mark.skipif(
    not RECORDS_FILE.exists(), reason=f"no record of suite {SUITE_VERSION} is handed in yet"
)
HEADER = {"cpu": "one", "torch": "2.13", "threads": 1, "small": False, "digests": dict.fromkeys(LOCKED, "")}
ROW = {"case": "lse:q=[64]", "kernel": "EAGER", "status": "pass", "used": {"lse": "0.1"}}


def handed_in(path: Path, records: list[Certificate]) -> list[Path]:
    """Records as files of their own."""
    names = [path / f"{number}.json" for number in range(len(records))]
    for file, record in zip(names, records, strict=True):
        file.write_bytes(msgspec.json.encode(record))
    return names


def written(path: Path, header: dict[str, Any], *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)), encoding="utf-8")
    return path


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module


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
    header: dict[str, Any],
    rows: list[dict[str, Any]],
    status: int,
    said: str,
    tmp_path: Path,
    script: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, after = written(tmp_path / "before", HEADER, ROW), written(tmp_path / "after", {**HEADER, **header}, *rows)
    assert script("lock").compare(before, after) == status
    assert said in "".join(capsys.readouterr())


@of_this_suite
def test_nothing_is_listed_without_equal_locks_and_four_records(tmp_path: Path, script: Callable[[str], Any]) -> None:
    accept = script("accept")
    listed = {**HEADER, "digests": {name: locked_digests()[name][0] for name in LOCKED}}
    records = handed_in(tmp_path, [kept_records(RECORDS_FILE)[0].certificate])
    same = written(tmp_path / "same", HEADER, ROW)
    known = list(accept.problems(written(tmp_path / "before", listed, ROW), same, records))
    assert any("expected records of 4 kernels or more, got 1" in problem for problem in known)
    unknown = written(tmp_path / "unknown", {**HEADER, "digests": dict.fromkeys(LOCKED, "0" * 64)}, ROW)
    said = f"'judging' of suite {SUITE_VERSION}: expected one of {locked_digests()['judging'][0]}"
    assert any(said in problem for problem in accept.problems(unknown, same, records))


@of_this_suite
def test_equal_locks_and_four_records_like_those_handed_in_are_enough(
    tmp_path: Path, script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = script("accept")
    alike: dict[str, list[Certificate]] = {}
    for record in (kept.certificate for kept in kept_records(RECORDS_FILE)):
        digests = {name: record.digests[name] for name in installed_digests()}
        alike.setdefault(json.dumps(digests), []).append(record)
    judged, records = max(alike.items(), key=lambda item: len(item[1]))
    monkeypatch.setattr(accept, "installed_digests", lambda: json.loads(judged))
    before = written(tmp_path / "before", {**HEADER, "digests": {n: locked_digests()[n][0] for n in LOCKED}}, ROW)
    after = written(tmp_path / "after", {**HEADER, "digests": json.loads(judged)}, ROW)
    assert list(accept.problems(before, after, handed_in(tmp_path, records))) == []


STORED = json.loads((files("mla_conformance.fixtures") / "suites.json").read_text())
DO = (
    "sources that decide verdicts have changed since this version was stored: show by ci/lock.py and ci/accept.py that "
    "verdicts are as before, or raise conformance/version.py if there are records of it, and run ci/suite_version.py"
)


def test_this_version_is_what_was_stored_of_it() -> None:
    here = version_digests()
    stored = STORED[SUITE_VERSION]
    latest = {name: digests for name, digests in stored.items() if name not in (EARLIER, SOURCES)}
    assert {**latest, **{name: stored[name][-1:] for name in LOCKED}} == here, DO


def test_no_two_versions_are_the_same() -> None:
    assert len({json.dumps(stored, sort_keys=True) for stored in STORED.values()}) == len(STORED)


def test_storing_this_version_again_changes_nothing(
    script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite_version = script("suite_version")
    names = ("suites.json", "mustpass.json")
    before = {name: (suite_version.FIXTURES / name).read_text("utf-8") for name in names}
    for name, text in before.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(suite_version, "FIXTURES", tmp_path)
    suite_version.main()
    assert {name: (tmp_path / name).read_text("utf-8") for name in names} == before
