"""Where output cannot go, verdict and exit status stand: one line says so, whatever stream, folder or locale fails."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.commands.console import _write_step_summary
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.vocabulary.capabilities import CAPABILITIES
from mla_conformance.vocabulary.case_files import write_case

COMMAND = Path(sys.executable).with_name("mla-conformance")
PASSED = Record("EAGER", "EAGER", "lse", CAPABILITIES["lse"].cases[0].id, Status.PASS)
FAILED = PASSED.with_fields(status=Status.FAIL, check="lse", message="wrong")
EAGER = "from mla_conformance.backends.eager import EagerPrefillBackend as E\nimport os, sys, signal\n"
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
Write = Callable[..., Path]


def test_the_gates_status_stands(write_report: Write) -> None:
    line = 'exec "$0" gate "$1" --require-tier none >/dev/full'
    done = subprocess.run(["bash", "-c", line, COMMAND, write_report("a.json", [FAILED])], capture_output=True)
    assert done.returncode == 1
    assert done.stderr == b"mla-conformance: standard output cannot be written: No space left on device\n"


def test_a_reader_that_has_enough_changes_no_status() -> None:
    process = subprocess.Popen([COMMAND, "mustpass"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = "mla-conformance: standard output cannot be written: Broken pipe\n"
    assert process.stderr.read().decode() == said and process.wait() == 0


def test_nothing_is_watched_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"{EAGER}class Mine(E): ...\n")
    monkeypatch.setattr("mla_conformance.engine.run.Run.prepare", lambda run: None)
    monkeypatch.setattr("mla_conformance.commands.watch._Watch._judge", lambda watch: None)
    monkeypatch.setattr("mla_conformance.commands.watch.is_read", lambda: False)
    assert main(["watch", f"{tmp_path / 'mine.py'}:Mine", "--device", "cpu"]) == 3
    assert capsys.readouterr().err == "mla-conformance: nobody reads the output\n"


def test_a_step_summary_that_cannot_be_written_is_one_line(
    write_report: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.mkfifo(place := tmp_path / "summary.md")
    _write_step_summary(str(place), load_report(write_report("a.json", [PASSED])))
    told = capsys.readouterr().err
    assert (
        told.startswith(f"mla-conformance: GITHUB_STEP_SUMMARY {place}: cannot be written: ") and told.count("\n") == 1
    )


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
    line = (
        'exec "$0" -m mla_conformance certify --backend mine.py:Mine --cases cases --device cpu -n1 --out out <&- >&-'
    )
    environment = {**os.environ, **C_LOCALE, "GITHUB_STEP_SUMMARY": "/dev/full"}
    asked = ["bash", "-c", line, sys.executable]
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    told = done.stderr.decode().splitlines()
    assert done.returncode == 0 and [line.rpartition(": ")[2] for line in told] == [
        "Bad file descriptor",
        "No space left on device",
    ]
    (mine,) = load_report(tmp_path / "out").backends
    assert (mine.counts.passed, mine.counts.failed) == (1, 0)


def test_export_says_of_a_kernel_that_it_ends_the_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = "class Mine(E):\n    def run_prefill_new_tokens(self, *a, **k): os._exit(0)\n"
    (tmp_path / "mine.py").write_text(EAGER + ends)
    backend = f"{tmp_path / 'mine.py'}:Mine"
    out = tmp_path / "out.py"
    assert main(["export", "lse:q=[4]", "--backend", backend, "--device", "cpu", "--out", str(out)]) == 2
    ended = f"export: a process that judged lse:q=[4] on {backend} ended: exit status 0"
    assert capsys.readouterr().err == f"mla-conformance: {ended}\n" and not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["certify", "--backend", "EAGER"],
        ["export", "lse:q=[4]", "--backend", "EAGER", "--out", "x.py"],
        ["replay", "lse:q=[4]", "--backend", "EAGER"],
        ["backends"],
    ],
)
def test_a_missing_torch_is_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("commands.export", "commands.replay"):
        monkeypatch.delitem(sys.modules, f"mla_conformance.{name}", raising=False)
    assert main(arguments) == 2 and not list(tmp_path.iterdir())
    told = capsys.readouterr().err
    assert told.startswith(f"mla-conformance: torch is not installed for {sys.executable}") and told.count("\n") == 1
