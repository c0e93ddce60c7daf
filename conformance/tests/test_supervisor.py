"""A run that is told to end, or whose supervisor is killed: nothing judged is lost, and no process is left."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.engine.journal import Journal, JournalEvent, Judgement
from mla_conformance.judging.verdict import Status
from mla_conformance.report.json_report import load_report
from mla_conformance.vocabulary.capabilities import write_case

COMMAND = Path(sys.executable).with_name("mla-conformance")
CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in range(1, 6)]
WAITS = """
import os, pathlib, time
from mla_conformance.backends.eager import EagerPrefillBackend


class Waits(EagerPrefillBackend):
    '''Of another dtype for two tokens; for as many as the file names it tells its process, and waits.'''

    def run_prefill_new_tokens(self, q, *arguments, **options):
        here = pathlib.Path(__file__).with_name("waits")
        if here.exists() and len(q) == int(here.read_text()):
            pathlib.Path(__file__).with_name("told").write_text(str(os.getpid()))
            time.sleep(1000)
        output, lse = super().run_prefill_new_tokens(q, *arguments, **options)
        return output, lse.double() if len(q) == 2 else lse
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backend, its cases, a fifo, and a whole undisturbed run."""
    home = tmp_path_factory.mktemp("home")
    (home / "waits.py").write_text(WAITS)
    os.mkfifo(home / "told")
    (home / "cases").mkdir()
    for number, case in enumerate(CASES):
        write_case(home / "cases" / f"{number}.json", Case.parse(case))
    assert main(begin(home, home / "whole")) == 1
    return home


def begin(home: Path, out: Path) -> list[str]:
    backend = f"--backend={home / 'waits.py'}:Waits"
    return ["certify", backend, f"--cases={home / 'cases'}", "--device=cpu", "-n1", f"--out={out}"]


def heed_signals() -> None:
    """Those that a shell ignores for what it starts in the background, or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def waiting(command: Path, home: Path, tokens: int, arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A run whose kernel waits in the case of so many tokens; afterwards its worker must have ended."""
    (home / "waits").write_text(str(tokens))
    reported = os.open(home / "told", os.O_RDONLY | os.O_NONBLOCK)
    process = subprocess.Popen(
        [command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    )
    assert select.select([reported], [], [], 120)[0], "no worker came to that case"
    worker = os.pidfd_open(int(os.read(reported, 100)))
    (home / "waits").unlink()
    yield process
    assert select.select([worker], [], [], 60)[0], "the worker outlives its run"
    for descriptor in (reported, worker):
        os.close(descriptor)


def test_a_signal_ends_a_run_with_summary_report_and_resume_line(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with waiting(COMMAND, home, 3, begin(home, out)) as process:  # as a user starts it
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate()
    assert process.returncode == 130
    assert f"ended by SIGINT; to continue: mla-conformance certify --resume {out}" in said
    assert "1 failed" in printed and "3 NOT RUN" in printed
    (waits,) = load_report(out).backends
    assert [(record.case, record.status) for record in waits.records] == [
        (CASES[0], Status.PASS),
        (CASES[1], Status.FAIL),
    ]


def test_a_deadline_ends_a_run_with_report_and_resume_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, append = time.monotonic, Journal.append

    def append_and_wait(journal: Journal, event: JournalEvent) -> None:
        append(journal, event)
        if isinstance(event, Judgement):
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)

    monkeypatch.setattr(Journal, "append", append_and_wait)
    assert main([*begin(home, tmp_path), "--deadline=1h"]) == 3
    printed = capsys.readouterr()
    assert f"ended by the deadline; to continue: mla-conformance certify --resume {tmp_path}" in printed.err
    assert [record.case for record in load_report(tmp_path).records] == [CASES[0]] and "4 NOT RUN" in printed.out
    monkeypatch.undo()
    assert main(["certify", "--resume", str(tmp_path), "-n1"]) == 1
    assert len(load_report(tmp_path).records) == len(CASES)


def test_a_deadline_before_anything_is_judged_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    asked = ["certify", "--backend=EAGER", "--capability=lse", "--tier=smoke", "--device=cpu"]
    assert main([*asked, f"--out={out}", "--deadline=.001s"]) == 3
    assert "ended by the deadline before anything was judged" in capsys.readouterr().err
    assert not out.exists()


def test_a_run_that_was_killed_told_to_end_and_resumed_gives_the_undisturbed_report(
    command: Path, home: Path, settled: Callable[[Path], Any], tmp_path: Path
) -> None:
    arguments = begin(home, tmp_path)
    for tokens, number, status in ((2, signal.SIGKILL, -signal.SIGKILL), (4, signal.SIGHUP, 129)):
        with waiting(command, home, tokens, arguments) as process:
            process.send_signal(number)
            process.communicate()
        assert process.returncode == status
        arguments = ["certify", "--resume", str(tmp_path), "-n1"]
    assert main(arguments) == 1
    assert settled(tmp_path / "report.json") == settled(home / "whole" / "report.json")
