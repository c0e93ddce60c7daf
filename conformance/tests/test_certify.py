"""``certify`` and ``watch`` end to end: a wrong backend fails with a line that reproduces it, whenever it is saved."""

import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mla_conformance.cli import main
from mla_conformance.report.loading import load_report
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import Tier, find_capability

CERTIFY = ["certify", "--tier", "smoke", "--device", "cpu", "-n", "1", "--capability", "lse"]
LSE_CASES = len(find_capability("lse").select(Tier.SMOKE))


def test_a_wrong_backend_fails_with_a_line_that_reproduces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(BASE_2)
    assert main([*CERTIFY, "--backend", f"{tmp_path / 'wrong.py'}:Mine", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    digest = hashlib.sha256((tmp_path / "out" / "report.json").read_bytes()).hexdigest()
    report = f"report {tmp_path / 'out' / 'report.html'}, and report.json beside it, SHA-256 {digest}\n"
    assert printed.endswith(f"\n{report}")
    told = (
        r" · judging 1 failure again, explaining 1 \(--no-explain leaves that out\)\n  Mine lse:\S+ new tokens: LSE is "
    )
    assert re.search(told, printed)
    (line,) = [line for line in printed.splitlines() if "replay: " in line]
    said = "The LSE is in base 2, expected the natural logarithm, like sgl-project/sglang#"
    assert f"wrong: Mine, 1 likely cause, {LSE_CASES} cases: {said}" in " ".join(printed.split())
    command, *arguments = shlex.split(line.partition("replay: ")[2])
    assert command == "mla-conformance" and main([*arguments, "--no-explain"]) == 1
    printed = capsys.readouterr().out
    assert "wrong: Mine, 1 likely cause, 1 case: the LSE is in base 2" in printed and "known defect" not in printed
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


COMMAND = Path(sys.executable).with_name("mla-conformance")
RIGHT = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Mine(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse * 1.0
"""
BASE_2 = RIGHT.replace("* 1.0", "/ 0.6931471805599453")
HANGING = RIGHT.replace("output, lse =", "open('hangs', 'w'), __import__('time').sleep(1000); output, lse =")
WRONG = RIGHT.replace("1.0", "1.5")
"""Of the same size; all are written within one second: what is cached of the one must not be taken for the other."""


def test_what_is_saved_is_judged_until_somebody_ends_it(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    moments = itertools.count(2 * 10**18, 10**6)

    def save(text: str) -> None:
        (tmp_path / "new").write_text(text)
        os.utime(tmp_path / "new", ns=(0, next(moments)))
        (tmp_path / "new").replace(source)

    save(RIGHT)
    options = ["--capability", "lse", "--device", "cpu"]
    watching = subprocess.Popen(
        [COMMAND, "watch", "mine.py:Mine", *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
        # Who is started in the background inherits that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def reported() -> str:
        assert watching.stdout is not None
        return watching.stdout.readline()

    def saved(text: str) -> str:
        save(text)
        return reported()

    try:
        assert re.fullmatch(r"[\d:]{8} Mine ✔ \d+ passed · 0 failed · .* of its budget · \d:\d\d\n", reported())
        assert re.match(r"[\d:]{8} Mine ✘ \d+ passed · [1-9]\d* failed", saved(WRONG))
        assert re.match(r"wrong: Mine, \d+ cases: the LSE is wrong, \S+ to \S+ × its budget", reported())
        while "replay: " not in (line := reported()):
            assert line.startswith("       ")
        assert line.endswith(" --backend mine.py:Mine\n")
        explained = f"{reported()} {reported()}"
        assert re.match(r"explained: \d+ cases: the LSE is wrong, unlike every known defect", explained)
        assert re.match(
            r"[\d:]{8} Mine \? '\S+/mine.py:Mine' does not import: SyntaxError: .*\(mine.py, line 1\)\n",
            saved("def" + RIGHT.lstrip()),
        )
        save(HANGING)
        while not (tmp_path / "hangs").exists():
            time.sleep(0.1)
        assert " Mine ✔ " in saved(RIGHT)  # at once, and nothing of what hung
    finally:
        watching.send_signal(signal.SIGINT)
        printed, complained = watching.communicate(timeout=60)
    assert (watching.returncode, printed, complained) == (130, "", "")


def test_only_a_class_in_a_file_is_certified_and_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def decode(q, **_): ...\n")
    assert main(["certify", "--backend", f"{tmp_path / 'mine.py'}:decode", "--out", str(tmp_path / "run")]) == 2
    assert "expected a class, got a function, which mla.cases judges: docs/python-api.md" in capsys.readouterr().err
    assert main(["watch", "EAGER"]) == 2
    assert "expected a class in a file, as file.py:Class, got EAGER" in capsys.readouterr().err
