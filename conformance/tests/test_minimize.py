"""Minimising a failure, and running it again from what a run left behind."""

import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cases.shrink import simpler
from mla_conformance.cli import main
from mla_conformance.engine.confirm import NothingToMinimize, minimize
from mla_conformance.engine.messages import Hello
from mla_conformance.engine.supervisor import Supervisor
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.case_files import read_case, write_case

Capture = pytest.CaptureFixture[str]
LARGE = Case.of(capability="chunked_context", q=(9, 5, 40), kv=(300, 17, 80), heads=6, dims="glm", data="needle", pad=3)

WRONG = """
import os, time
from mla_conformance.backends.eager import EagerPrefillBackend

class Wrong(EagerPrefillBackend):
    '''Its LSE is off where a request has more than 6 new tokens; it dies, hangs or raises on the way there.'''

    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, **optional):
        output, lse = super().run_prefill_new_tokens(q, k, v, return_softmax_lse, **optional)
        longest = self._prefill_metadata.query_start_loc.diff().max()
        if q.shape[0] == 9:
            os.abort()
        if q.shape[0] == 11 and self.num_heads == 2:
            time.sleep(1000)
        if longest < 6:
            raise ValueError("another failure")
        return output, lse + (longest > 6)
"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong.py").write_text(WRONG)
    return f"{tmp_path / 'wrong.py'}:Wrong"


def test_every_step_is_simpler_and_valid() -> None:
    steps = list(simpler(LARGE))
    assert len(set(steps)) > 20 and LARGE not in steps
    assert all(len(step.q) == len(step.kv) and Case.parse(step.id) == step for step in steps)
    assert list(simpler(Case.of(capability="lse", q=(1,), dims="small", heads=1))) == []


def record(case: Case, status: Status = Status.CRASH, check: str = "") -> Record:
    return Record("Mine", "mine.py:Mine", case.capability, case.id, status, check=check)


def test_only_the_same_failure_counts() -> None:
    def judge(case: Case) -> Record:
        if len(case.q) > 1 and max(case.kv) >= 20 and case.data == "needle":
            return record(case, Status.FAIL, Check.LSE)
        return record(case, Status.FAIL, Check.OUTPUT) if case.heads > 1 else record(case)

    minimum = minimize(LARGE, judge, limit=1000)
    assert minimum.complete and minimum.record.check == Check.LSE and minimum.record.case == minimum.case.id
    expected = Case.of(capability=LARGE.capability, q=(1, 1), kv=(20, 0), heads=1, dims="small", data="needle")
    assert sorted(minimum.case.kv) == [0, 20] and replace(minimum.case, kv=expected.kv) == expected


def test_tries_are_limited() -> None:
    minimum = minimize(LARGE, record, limit=3)
    assert not minimum.complete and minimum.tries == 4


def test_what_passes_is_not_minimised() -> None:
    with pytest.raises(NothingToMinimize, match="expected a case that fails, got pass of chunked_context"):
        minimize(LARGE, lambda case: record(case, Status.PASS), limit=3)


def test_minimising_survives_crashes_and_hangs(wrong: str, tmp_path: Path, capsys: Capture) -> None:
    case, found = tmp_path / "case.json", tmp_path / "found.json"
    write_case(case, Case.parse("lse:dims=small;q=[5,9,2];heads=2;data=needle;pad=2"))
    options = ["--backend", wrong, "--salt", "s1", "--device", "cpu", "--timeout", "2", "--out", str(found)]
    assert main(["minimize", str(case), *options]) == 0
    assert read_case(found) == Case.of(capability="lse", q=(7,), heads=1, dims="small")
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("replay: ")]
    subject = Subject.of(wrong, torch.device("cpu"))
    salted, plain = (judge_one(subject, read_case(found), Context(salt)).message for salt in ("s1", ""))
    assert f"fail: {salted}" in printed and "LSE is" in salted != plain
    command, *arguments = shlex.split(line.removeprefix("replay: "))
    assert command == "mla-conformance" and main(arguments) == 1
    assert salted.partition(", expected")[0] in capsys.readouterr().out


def test_minimising_can_be_ended(wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    hello = Supervisor.hello

    def hello_to_the_end(supervisor: Supervisor) -> Hello:
        os.kill(os.getpid(), signal.SIGTERM)
        return hello(supervisor)

    monkeypatch.setattr(Supervisor, "hello", hello_to_the_end)
    assert main(["minimize", "lse:q=[7]", "--backend", wrong, "--device", "cpu"]) == 143
    assert "ended by SIGTERM" in capsys.readouterr().err


def test_a_failure_of_a_report_runs_again(wrong: str, write_report: Callable[..., Path], capsys: Capture) -> None:
    cases = ("lse:q=[3]", "lse:q=[7]")
    records = [Record("Wrong", wrong, "lse", case, Status.FAIL, message=f"wrong in {case}") for case in cases]
    path = write_report("report.json", records)
    assert main(["replay", "--report", str(path), "--failure", "2", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("wrong: Wrong, 1 case: ") == 1 and "replay 'lse:q=[7]'" in printed
    assert main(["replay", "--report", str(path), "--failure", "3"]) == 2
    assert "expected --failure 1 to 2, got 3: 1. wrong in lse:q=[3]; 2. wrong in" in capsys.readouterr().err


def test_a_place_for_no_case_file_is_refused_before_anything_is_judged(tmp_path: Path, capsys: Capture) -> None:
    assert main(["minimize", "lse:q=[4]", "--backend", "EAGER", "--device", "cpu", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.endswith(f"{tmp_path}: expected a file, this is a folder\n") and not printed.out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ('{"id": "x", "case": {"format": 2}}', "expected case format 1, got 2"),
        ('{"id": "x", "case": {"format": 1, "capability": "lse", "q": [1], "nope": 1}}', "unknown case field nope"),
        ('{"id": "x", "case": {"format": 1, "capability": "lse", "q": "x"}}', "field q: expected a list of integers"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "minimize"])
def test_a_file_without_a_case(tmp_path: Path, capsys: Capture, command: str, content: str | None, said: str) -> None:
    path = tmp_path / "case.json"
    if content is not None:
        path.write_text(content)
    assert main([command, str(path), "--backend", "EAGER", "--device", "cpu"]) == 2
    message = capsys.readouterr().err
    assert said in message and str(path) in message
    assert content is None or path.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected either a case"),
        (["lse:q=[1]", "--report", "report.json"], "expected either a case"),
        (["lse:q=[1]"], "expected --backend"),
    ],
)
def test_what_replay_is_asked_for(capsys: Capture, arguments: list[str], said: str) -> None:
    assert main(["replay", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_case_file_holds_its_case(tmp_path: Path) -> None:
    write_case(tmp_path / "deeper" / "case.json", LARGE)
    assert read_case(tmp_path / "deeper" / "case.json") == LARGE
