"""What a person sees: colour where a terminal has it, one live line, widths, and lines that can be copied."""

import io
import itertools
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.commands import console
from mla_conformance.commands.console import Progress, live
from mla_conformance.judging.record import BackendFacts, Record, Status
from mla_conformance.report.outcome import Detail, backend_lines, cause_lines, outcome_lines
from mla_conformance.report.summary import BackendSummary, RunSummary, summarise
from mla_conformance.report.terminal import painted, say

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINE = "MyBackend ✘ passed 2/5 cases · 3 failed · 1 NOT RUN"


@pytest.fixture(autouse=True)
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "COLORTERM", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [(True, "", True), (False, "", False), (True, "TERM=dumb", False), (False, "FORCE_COLOR=1 NO_COLOR=1", False)],
)
def test_colour_is_for_terminals(terminal: bool, variables: str, coloured: bool, monkeypatch: Any) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    found = painted(LINE, stream)
    assert (found != LINE) is coloured and ESCAPE.sub("", found) == LINE


def record(case: str, status: Status = Status.PASS, backend: str = "B", **changes: str) -> Record:
    return Record(backend, changes.get("reference", "B"), case.partition(":")[0], case, status, used={"lse": 0.5})


def test_the_live_line_counts_and_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    resumed = Progress(10, done=2, failed=1, parts=0)
    now[0] += 30
    resumed(record("lse:q=[1]", Status.FAIL))
    assert resumed.line == "3/10 judged · 2 failed · 0:30 · about 3:30 left · B lse"
    resumed.phase("judging 7 cases with the GPU for itself")
    assert resumed.line == "3/10 judged · 2 failed · 0:30 · judging 7 cases with the GPU for itself"
    now[0] += 60  # whose pace is another
    resumed(record("many_rows:q=[1]"))
    assert resumed.line.startswith("4/10 judged · 2 failed · 1:30 · about 6:00 left · judging 7 cases")
    resumed.done = 10
    resumed.phase("judging 2 failures again")
    resumed(record("lse:q=[1]", Status.FAIL).with_fields(confirmation="alone"))
    assert resumed.line == "10/10 judged · 2 failed · 1:30 · judging 2 failures again"


def test_a_pipe_gets_ten_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    counting = Progress(200)
    with live(lambda: counting.line):
        for number in range(200):
            counting(record(f"lse:q=[{number}]"))
    printed = capsys.readouterr().out
    counts = re.findall(r"^… (\d+)/200 judged · 0 failed · ", printed, re.MULTILINE)
    assert list(map(int, counts)) == list(range(20, 201, 20))
    assert len(printed.splitlines()) == 10 and not ESCAPE.search(printed) and "\r" not in printed


def test_each_of_several_backends_is_told_of_when_nothing_of_it_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    counting = Progress(3, parts=1)
    counting.left.update({"A": 2, "B": 1})
    with live(lambda: counting.line) as counting.tell:
        for backend, status in (("A", Status.PASS), ("B", Status.UNSUPPORTED), ("A", Status.FAIL)):
            counting(record("lse:q=[1]", status, backend))
    told = [line for line in capsys.readouterr().out.splitlines() if line[0] != "…"]
    assert told == ["B: 1 unsupported · 0:00", "A: 1 passed, 1 failed · 0:00"]


def printed_on_a_terminal(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> str:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        act()
        say("the end")
        printed = b""
        while b"the end" not in printed:
            printed += os.read(ours, 2**16)
    os.close(ours)
    return printed.decode().partition("the end")[0]


def test_a_terminal_has_one_line_that_is_drawn_anew_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (f"{number} judged \x1b]0;title\x07" for number in itertools.count())

    def wait() -> None:
        with live(lambda: next(shown)):
            time.sleep(0.6)

    printed = printed_on_a_terminal(monkeypatch, wait)
    drawn = re.findall(r"(\d+) judged", printed)
    assert len(drawn) >= 2 and printed.count("\r\x1b[2K") >= len(drawn) - 1 and printed.count("\n") == 1
    assert printed.endswith("\x1b[1A\x1b[2K") and "\x1b]0;" not in printed and "\x07" not in printed


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_a_job_with_a_terminal_has_no_live_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)

    def nothing() -> None:
        with live(lambda: "judged"):
            pass

    assert printed_on_a_terminal(monkeypatch, nothing) == ""


def many() -> BackendSummary:
    names = [f"capability_{'x' * (number % 9)}{number}" for number in range(60)]
    statuses = [Status.UNSUPPORTED if number % 3 == 0 else Status.PASS for number in range(60)]
    records = [record(f"{name}:q=[{n}]", status) for name, status in zip(names, statuses, strict=True) for n in (1, 2)]
    return BackendSummary(BackendFacts("B"), summarise(records, names * 2))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_what_passed_is_compact_and_what_is_unsupported_one_line(width: int) -> None:
    lines = list(backend_lines(many(), width))
    assert lines[0] == "B ✔ right: 80 of 120 prefill cases (40 unsupported)"
    assert all(len(line) <= width for line in lines)
    (unsupported,) = [line for line in lines if "unsupported:" in line]
    shown, more = re.fullmatch(r"  – 20 unsupported: (.*) and (\d+) more", unsupported).groups()  # type: ignore[union-attr]
    assert len(shown.split(", ")) + int(more) == 20
    listed = (line for line in lines if line.startswith("  ✔") or line.startswith("    capability"))
    passed = [text for line in listed for text in line.strip(" ✔,").split(", ")]
    assert len(passed) == 40 and all(re.fullmatch(r"capability_x*\d+ 2", text) for text in passed)


def test_what_a_kernel_is_right_on_leaves_out_what_it_does_not_do_and_what_fails_stands_first() -> None:
    """Of roles of which nothing was judged it is not told as of cases that it failed."""
    passed = [record(f"new_tokens:q=[{n}]", Status.PASS) for n in (1, 2)]
    others = [record(f"decode:q=[1];kv=[{n}]", Status.UNSUPPORTED) for n in (1, 2, 3)]
    summary = BackendSummary(BackendFacts("B"), summarise([*passed, *others]))
    run = RunSummary({}, (summary, BackendSummary(BackendFacts("A", reasons=("no GPU",)))))
    quiet = list(outcome_lines(run, 80, brief=True, detail=Detail.QUIET))
    assert quiet == ["B ✔ right: all 2 prefill cases; 3 of other roles do not apply"]
    usual, full = (list(outcome_lines(run, 80, detail=detail)) for detail in (Detail.USUAL, Detail.FULL))
    assert usual == [*quiet, "A ? unavailable: no GPU"]
    assert full[1:3] == ["  ✔ new_tokens 2", "  – 1 unsupported: decode"]
    cases = {"a": [Status.PASS], "b": [Status.FAIL, Status.PASS], "c": [Status.PASS, Status.UNSUPPORTED], "d": []}
    cases["e"] = [Status.PASS, Status.UNAVAILABLE, Status.EXPECTED_FAILURE]
    records = [record(f"{name}:q=[{n}]", status) for name, group in cases.items() for n, status in enumerate(group)]
    summary = BackendSummary(BackendFacts("B"), summarise(records, ["d"] * 4), stopped="gave up")
    assert list(backend_lines(summary, 80)) == [
        "B ✘ passed 4/11 cases, 2/5 capabilities",
        "  ✘ b 1/2",
        "  ? e 1/3 (1 unavailable) (1 expected to fail)",
        "  ✔ a 1, c 1 of 2",
        "  ? 1 not begun: d",
        "  4 NOT RUN: gave up",
    ]
    foreseen = [record("a:q=[1]"), record("a:q=[2]", Status.EXPECTED_FAILURE), record("b:q=[1]")]
    summary = BackendSummary(BackendFacts("B"), summarise(foreseen, ["a", "a", "b"]))
    first, second, *_ = backend_lines(summary, 80)
    assert first == "B ! wrong, as expected, on 1 of 3 cases; 1/2 capabilities"
    assert second == "  ! a 1 of 2 (1 expected to fail)"


def test_a_replay_line_is_whole_and_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failure = record("lse:q=[1x48]", Status.FAIL, reference=f"{tmp_path}/my kernels/{'x' * 70}.py:B")
    summary = BackendSummary(BackendFacts("B"), summarise([failure]))
    *_, line = cause_lines(RunSummary({}, (summary,)), 60)
    words = shlex.split(line.partition("replay: ")[2])
    assert words == ["mla-conformance", "replay", "lse:q=[1x48]", "--backend", f"my kernels/{'x' * 70}.py:B"]
    monkeypatch.chdir("/")
    *_, elsewhere = cause_lines(RunSummary({}, (summary,)), 60)
    assert f"{str(tmp_path)[1:]}/my kernels" in elsewhere
