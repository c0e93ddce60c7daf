"""``certify`` end to end: a wrong backend fails with a line that reproduces it, and a rerun loses nothing."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from mla_conformance.cli import main
from mla_conformance.report.loading import load_report
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import Tier, find_capability

CERTIFY = ["certify", "--tier", "smoke", "--device", "cpu", "-n", "1", "--capability", "lse"]
LSE_CASES = len(find_capability("lse").select(Tier.SMOKE))
BASE_2 = """
import math
from mla_conformance.backends.eager import EagerPrefillBackend

class Base2(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / math.log(2)
"""


def test_a_wrong_backend_fails_with_a_line_that_reproduces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(BASE_2)
    assert main([*CERTIFY, "--backend", f"{tmp_path / 'wrong.py'}:Base2", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    digest = hashlib.sha256((tmp_path / "out" / "report.json").read_bytes()).hexdigest()
    report = f"report {tmp_path / 'out' / 'report.html'}, and report.json beside it, SHA-256 {digest}\n"
    assert printed.endswith(f"\n{report}")
    assert " · judging 1 failure again, and looking for an explanation\n" in printed
    (line,) = [line for line in printed.splitlines() if "replay: " in line]
    said = "The LSE is in base 2, expected the natural logarithm, like sgl-project/sglang#"
    assert f"wrong: Base2, 1 likely cause, {LSE_CASES} cases: {said}" in " ".join(printed.split())
    command, *arguments = shlex.split(line.partition("replay: ")[2])
    assert command == "mla-conformance" and main(arguments) == 1
    printed = capsys.readouterr().out
    assert "wrong: Base2, 1 likely cause, 1 case: The LSE is in base 2" in printed
    assert f" · suite {SUITE_VERSION} · 1 case · golden float64\n" in printed and "report.html" not in printed


def test_fresh_keeps_an_unfinished_run_beside_and_judges_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step_summary = tmp_path / "out", tmp_path / "step.md"
    out.mkdir()
    (out / "journal.jsonl").write_text('{"event": "plan"}\n')
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step_summary))
    backends = ["--backend", "EAGER", "--backend", "FLASH_ATTN"]
    assert main([*CERTIFY, *backends, "--out", str(out), "--fresh"]) == 0
    (kept,) = tmp_path.glob("out-*")
    assert (kept / "journal.jsonl").read_text() == '{"event": "plan"}\n'
    eager, absent = load_report(out).backends
    assert absent.reasons and not absent.capabilities and "FLASH_ATTN ? unavailable: " in capsys.readouterr().out
    assert (eager.counts.passed, eager.counts.failed, eager.counts.not_run) == (LSE_CASES, 0, 0)
    assert "EAGER" in step_summary.read_text()


def test_a_run_that_could_judge_nothing_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CERTIFY, "--backend", "no_such_module:Mine", "--out", str(tmp_path), "--json"]) == 3
    mine = json.loads(capsys.readouterr().out)["backends"]["Mine"]
    assert mine["status"] == "unavailable" and "No module named 'no_such_module'" in mine["reasons"][0]


def test_cases_of_a_role_that_a_backend_lacks_reach_no_process(tmp_path: Path) -> None:
    wanted = ["--capability", "decode_lse", "--backend", "mla_conformance.backends.eager:EagerPrefillBackend"]
    main([*CERTIFY, *wanted, "--out", str(tmp_path / "run")])
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    started = {line["case"] for line in lines if line["event"] == "started"}
    records = [line["record"] for line in lines if line["event"] == "verdict"]
    lacking = [each for each in records if each["capability"] == "decode_lse"]
    assert {(each["status"], each["message"]) for each in lacking} == {("unsupported", "prefill only")}
    assert started and started.isdisjoint(each["case"] for each in lacking)
