"""``certify`` and ``watch`` end to end, and where output cannot go: verdict and exit status stand."""

import hashlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.judging.record import Record, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.version import SUITE_VERSION
from mla_conformance.vocabulary.capabilities import CAPABILITIES, Tier, find_capability, write_case

CERTIFY = ["certify", "--tier", "smoke", "--device", "cpu", "-n", "1", "--capability", "lse"]
Ours = Callable[..., tuple[int, str, str]]
LSE_CASES = len(find_capability("lse").select(Tier.SMOKE))


def test_a_wrong_backend_fails_with_a_line_that_reproduces_it(tmp_path: Path, ours: Ours) -> None:
    (tmp_path / "wrong.py").write_text(BASE_2)
    status, printed, _ = ours(*CERTIFY, "--backend", f"{tmp_path / 'wrong.py'}:Mine", "--out", tmp_path / "out")
    digest = hashlib.sha256((tmp_path / "out" / "report.json").read_bytes()).hexdigest()
    report = f"report {tmp_path / 'out' / 'report.html'}, and report.json beside it, SHA-256 {digest}\n"
    assert status == 1 and printed.endswith(f"\n{report}")
    explaining = r" · judging 1 failure again, explaining 1 \(--no-explain leaves that out\)"
    assert re.search(rf"{explaining}\n  Mine lse:\S+ new tokens: LSE is ", printed)
    (line,) = [line for line in printed.splitlines() if "replay: " in line]
    said = "The LSE is in base 2, expected the natural logarithm, like sgl-project/sglang#"
    assert f"wrong: Mine, 1 likely cause, {LSE_CASES} cases: {said}" in " ".join(printed.split())
    command, *arguments = shlex.split(line.partition("replay: ")[2])
    status, printed, _ = ours(*arguments, "--no-explain")
    assert (command, status) == ("mla-conformance", 1)
    assert "wrong: Mine, 1 likely cause, 1 case: the LSE is in base 2" in printed and "known defect" not in printed
    assert f" · suite {SUITE_VERSION} · 1 case · golden float64\n" in printed and "report.html" not in printed


def test_fresh_keeps_an_unfinished_run_beside_and_judges_anew(tmp_path: Path, ours: Ours) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "journal.jsonl").write_text('{"event": "plan"}\n')
    status, *_ = ours(*CERTIFY, "--backend", "EAGER", "--out", out, "--fresh")
    (kept,) = tmp_path.glob("out-*")
    assert status == 0 and (kept / "journal.jsonl").read_text() == '{"event": "plan"}\n'
    (eager,) = load_report(out).backends
    assert (eager.counts.passed, eager.counts.failed, eager.counts.not_run) == (LSE_CASES, 0, 0)


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
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Who is started in the background inherits that SIGINT is ignored.
    streams |= {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    watching: Any = subprocess.Popen(
        [COMMAND, "watch", "mine.py:Mine", *options], cwd=tmp_path, env=variables, **streams
    )
    reported = watching.stdout.readline

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
        broken = saved("def" + RIGHT.lstrip())
        assert re.match(r"[\d:]{8} Mine \? '\S+/mine.py:Mine' does not import: SyntaxError: .*mine.py, line 1", broken)
        save(HANGING)
        while not (tmp_path / "hangs").exists():
            time.sleep(0.1)
        assert " Mine ✔ " in saved(RIGHT)  # at once, and nothing of what hung
    finally:
        watching.send_signal(signal.SIGINT)
        printed, complained = watching.communicate(timeout=60)
    assert (watching.returncode, printed, complained) == (130, "", "")


FAILED = Record("EAGER", "EAGER", "lse", CAPABILITIES["lse"].cases[0].id, Status.FAIL, check="lse", message="wrong")
EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend as E\nimport os\n"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("line", "status", "why"),
    [
        ('"$0" gate "$1" --require-tier none >/dev/full', 1, "No space left on device"),
        ('"$0" mustpass | true; exit ${PIPESTATUS[0]}', 0, "Broken pipe"),
    ],
)
def test_the_status_stands_where_nobody_reads(write_report: Any, line: str, status: int, why: str) -> None:
    asked = ["bash", "-c", line, str(COMMAND), str(write_report("a.json", [FAILED]))]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, f"mla-conformance: standard output cannot be written: {why}\n")


def test_nothing_is_watched_that_nobody_reads(tmp_path: Path, monkeypatch: Any, ours: Ours) -> None:
    (tmp_path / "mine.py").write_text(f"{EAGER}class Mine(E): ...\n")
    monkeypatch.setattr("mla_conformance.engine.run.Run.prepare", lambda run: None)
    monkeypatch.setattr("mla_conformance.engine.run.Run.begin", lambda run: None)
    monkeypatch.setattr("mla_conformance.commands.replay._judge_anew", lambda *_: None)
    monkeypatch.setattr("mla_conformance.commands.replay.is_read", lambda: False)
    status, _, said = ours("watch", f"{tmp_path / 'mine.py'}:Mine", "--device", "cpu")
    assert (status, said) == (3, "mla-conformance: nobody reads the output\n")


def test_a_current_folder_that_is_gone_is_told_in_a_sentence(tmp_path: Path) -> None:
    line = ["bash", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$0" certify --device cpu', str(COMMAND)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = "the current folder: No such file or directory; change into one that is there"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"mla-conformance: {said}\n")


def test_neither_locale_nor_files_beside_nor_streams_change_a_verdict(tmp_path: Path) -> None:
    for name in ("torch", "jinja2", "rich", "numpy", "msgspec", "conformance/__init__", "random"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this stands in for another module')\n")
    (tmp_path / "mine.py").write_text(f"{EAGER}class Mine(E): 'é'\n", encoding="utf-8")
    (tmp_path / "cases").mkdir()
    write_case(tmp_path / "cases" / "one.json", Case.parse("lse:dims=small;heads=2;q=[3]"))
    line = "-m mla_conformance certify --backend mine.py:Mine --cases cases --device cpu -n1 --out out <&- >&-"
    environment = {**os.environ, **C_LOCALE, "GITHUB_STEP_SUMMARY": "/dev/full"}
    asked = ["bash", "-c", f'exec "$0" {line}', sys.executable]
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    told = [line.rpartition(": ")[2] for line in done.stderr.decode().splitlines()]
    assert (done.returncode, told) == (0, ["Bad file descriptor", "No space left on device"])
    (mine,) = load_report(tmp_path / "out").backends
    assert (mine.counts.passed, mine.counts.failed) == (1, 0)


def test_export_says_of_a_kernel_that_it_ends_the_process(tmp_path: Path, refused: Any) -> None:
    ends = "class Mine(E):\n    def run_prefill_new_tokens(self, *a, **k): os._exit(0)\n"
    (tmp_path / "mine.py").write_text(EAGER + ends)
    backend = f"{tmp_path / 'mine.py'}:Mine"
    out = tmp_path / "out.py"
    ended = f"export: a process that judged lse:q=[4] on {backend} ended: exit status 0"
    said = refused("export", "lse:q=[4]", "--backend", backend, "--device", "cpu", "--out", out)
    assert said == f"mla-conformance: {ended}\n" and not out.exists()


@pytest.mark.parametrize("asked", ["certify", "export lse:q=[4] --out x.py", "replay lse:q=[4]", ""])
def test_a_missing_torch_is_one_sentence(asked: str, here: Path, monkeypatch: Any, refused: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("commands.export", "commands.replay"):
        monkeypatch.delitem(sys.modules, f"mla_conformance.{name}", raising=False)
    told = refused(*([*asked.split(), "--backend", "EAGER"] if asked else ["backends"]))
    assert told.startswith(f"mla-conformance: torch is not installed for {sys.executable}") and told.count("\n") == 1
    assert not list(here.iterdir())
