"""Reports and certificates with any one value replaced: judged or refused, never a traceback."""

import copy
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.capabilities import CAPABILITIES
from mla_conformance.cases.sharding import Shard
from mla_conformance.certificate.digests import seal
from mla_conformance.certificate.issue import SCHEMA, count, installed_digests
from mla_conformance.certificate.verify import problems
from mla_conformance.cli import main
from mla_conformance.judging.record import EXPLORED, Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.commands import FORMATS
from mla_conformance.report.json_report import report_json, write_json
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.version import SUITE_VERSION

ODD: tuple[Any, ...] = (None, 7, "odd", [[]])
CASES = [case.id for case in CAPABILITIES["lse"].cases[:3]]


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Ways to every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield (key,)
        yield from ((key, *rest) for rest in paths(below))


def edits(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies in which one value is replaced, each with where and by what."""
    for path in paths(value):
        for odd in ODD:
            edited = copy.deepcopy(value)
            inner = edited
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            yield (*path, odd), edited


def test_any_value_of_a_report(
    write_report: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed = [Record("MINE", "MINE", "lse", case, Status.PASS, used={"lse": 0.3}) for case in CASES[:2]]
    (tmp_path / "known.toml").write_text(
        '[[expectation]]\nbackend = "MINE"\ncase = "lse"\nreason = "r"\nwhen = "torch < 1"'
    )
    good = write_report("good.json", passed)
    for where, edited in edits(json.loads(good.read_text())):
        (tmp_path / "bad.json").write_text(json.dumps(edited))
        status = main(["gate", str(tmp_path / "bad.json"), "--expectations", str(tmp_path)])
        captured = capsys.readouterr()
        assert status in (0, 1) or (status == 2 and "bad.json" in captured.err), (where, captured)


@pytest.mark.parametrize("command", ["render", "diff", "merge"])
def test_any_value_of_a_report_with_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """A shard with a pass, a failure, an expected one and an unavailable backend, for the commands on reports."""
    passed = Record("MINE", "MINE", "lse", CASES[0], Status.PASS, used={"lse": 0.3}, evidence={"kernel": "k"})
    failed = Record("MINE", "MINE", "lse", CASES[1], Status.FAIL, "wrong", "lse", "4.2", {"head": 1}, {"lse": 7.0})
    waived = replace(failed, case=CASES[2], status=Status.EXPECTED_FAILURE, judged="fail", expectation="known")
    drawn = replace(passed, capability=EXPLORED, cases=3) if command != "merge" else None
    records = [record for record in (passed, failed, waived, drawn) if record]
    mine = BackendSummary("MINE", (), {"t": "1"}, False, (("l", "a"),), {"p": "m"}, summarise(records, {}), "MINE")
    absent = BackendSummary("GONE", ("why",), {}, False, (), {}, (), "GONE")
    told = {name: "x" for name in ("suite", "tier", "device", "torch")}
    run = RunSummary(told, (mine, absent), tuple(CASES), Shard(1, 1, tuple(CASES)))
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    write_json(good, report_json(run))
    calls = {
        "render": [["render", str(bad), "--format", kind] for kind in FORMATS],
        "diff": [["diff", str(good), str(bad)]],
        "merge": [["merge", str(bad), "--out", str(tmp_path / "out.json")]],
    }
    for call in calls[command]:
        for where, edited in edits(json.loads(good.read_text())):
            bad.write_text(json.dumps(edited))
            status = main(["report", *call])
            captured = capsys.readouterr()
            assert status in (0, 1, 3) or (status == 2 and "bad.json" in captured.err), (where, captured)


def test_any_value_of_a_certificate() -> None:
    good = {
        "schema": SCHEMA, "suite": SUITE_VERSION, "version": "1", "tier": "full", "date": "2026-01-01",
        "backend": "MINE", "device": "cpu", "environment": {"device": "cpu", "suite": SUITE_VERSION}, "versions": {},
        "rounding": {}, "evidence": [], "clean_tree": None, "digests": installed_digests(),
        "counts": count(2, Counter()), "findings": [{"case": CASES[0], "expectation": "r"}],
        "cases": {CASES[0]: "expected_failure", CASES[1]: "pass"}, "seal": "",
    }  # fmt: skip
    for where, edited in edits(good):
        found = problems({**edited, "seal": seal(edited)}, datetime.date(2026, 6, 1))
        assert found and all(isinstance(problem, str) for problem in found), where
