"""``certify`` end to end, on backends that fail, die, or take the whole run with them: nothing judged is lost."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.capabilities import Tier, find_capability
from mla_conformance.cases.case import Call, Case
from mla_conformance.cli import main

SMOKE = ["--tier", "smoke", "--device", "cpu", "-n", "1", "--capability"]
LISTED = find_capability("lse").select(Tier.SMOKE)

BASE_2 = """
import math
from mla_conformance.backends.eager import EagerPrefillBackend

class Base2(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / math.log(2)
"""

DIES = """
import ctypes, os, signal
from mla_conformance.backends.eager import EagerPrefillBackend

class Dies(EagerPrefillBackend):
    def _batch(self, q, k, v, query_start_loc, *rest, **more):
        if query_start_loc == {killed}:
            os.kill(os.getpid(), signal.SIGKILL)
        if query_start_loc == {null}:
            ctypes.string_at(0)
        return super()._batch(q, k, v, query_start_loc, *rest, **more)
"""

KILLS_PYTEST = """
import os, signal, pytest

class Killer:
    judged = 0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.judged += report.when == "call"
        if self.judged == 2:
            os.kill(os.getpid(), signal.SIGKILL)

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Killer())
"""


def start_loc(case: Case) -> list[int]:
    return [sum(case.q[:count]) for count in range(len(case.q) + 1)]


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def test_a_wrong_backend_fails_with_a_line_that_reproduces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(BASE_2)
    assert main(["certify", *SMOKE, "lse", "--backend", f"{tmp_path / 'wrong.py'}:Base2", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "replay: " in line]
    assert "FAIL Base2 lse · case lse:" in printed and "base 2, expected natural log" in printed
    command, *arguments = shlex.split(line.partition("replay: ")[2])
    assert command == "mla-conformance" and main(arguments) == 1
    assert "base 2, expected natural log" in capsys.readouterr().out


def test_the_report_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, junit = tmp_path / "out", tmp_path / "junit.xml"
    backends = ["--backend", "EAGER", "--backend", "FLASH_ATTN", "--out", str(out)]
    assert main(["certify", *SMOKE, "lse", *backends, "--json", f"--junitxml={junit}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == report_of(out) and {"schema", "suite", "environment", "backends"} <= set(report)
    absent, judged = report["backends"]["FLASH_ATTN"], report["backends"]["EAGER"]
    assert absent["status"] == "unavailable" and absent["reasons"] and absent["capabilities"] == {}
    assert judged["status"] == "pass" and judged["reasons"] == [] and judged["versions"]["torch"]
    lse = judged["capabilities"]["lse"]
    assert {name: lse[name] for name in ("status", "passed", "failed", "unsupported", "failures")} == {
        "status": "pass", "passed": len(LISTED), "failed": 0, "unsupported": 0, "failures": [],
    }  # fmt: skip
    assert 0 < lse["error_budget_used"] <= 1
    assert junit.read_text(encoding="utf-8").count("<testcase ") == len(LISTED)


def test_cases_that_a_filter_leaves_out_are_not_run_and_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--backend", "EAGER", "--out", str(tmp_path), "-k", "context_chunk"]
    assert main(["certify", *SMOKE, "lse", *arguments]) == 3
    lse = report_of(tmp_path)["backends"]["EAGER"]["capabilities"]["lse"]
    kept = sum(case.call == Call.CONTEXT_CHUNK for case in LISTED)
    assert (lse["status"], lse["passed"], lse["not_run"]) == ("not_run", kept, len(LISTED) - kept)
    assert f"{len(LISTED) - kept} NOT RUN" in capsys.readouterr().out


def test_arguments_that_pytest_refuses_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", *SMOKE, "lse", "--backend", "EAGER", "--out", str(tmp_path), "--nonsense"]) == 2
    message = capsys.readouterr().err
    assert "pytest refused its arguments" in message and "--nonsense" in message


def test_a_backend_that_kills_its_process_loses_one_case_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, null, *spared = LISTED
    source = DIES.format(killed=start_loc(killed), null=start_loc(null))
    (tmp_path / "dies.py").write_text(source)
    assert main(["certify", *SMOKE, "lse", "--backend", f"{tmp_path / 'dies.py'}:Dies", "--out", str(tmp_path)]) == 1
    lse = report_of(tmp_path)["backends"]["Dies"]["capabilities"]["lse"]
    assert (lse["status"], lse["passed"], lse["failed"], lse["not_run"]) == ("fail", len(spared), 2, 0)
    assert {failure["case"] for failure in lse["failures"]} == {killed.id, null.id}
    assert {failure["status"] for failure in lse["failures"]} == {"crash"}
    assert "the process died during this case" in capsys.readouterr().out


def test_what_was_judged_before_pytest_died_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killer.py").write_text(KILLS_PYTEST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arguments = ["--backend", "EAGER", "--out", str(tmp_path), "-p", "killer"]
    assert main(["certify", *SMOKE, "lse", *arguments]) == 3
    assert "pytest ended with status -9" in capsys.readouterr().err
    lse = report_of(tmp_path)["backends"]["EAGER"]["capabilities"]["lse"]
    assert (lse["status"], lse["passed"], lse["not_run"]) == ("not_run", 2, len(LISTED) - 2)
