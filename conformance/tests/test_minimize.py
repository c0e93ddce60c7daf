"""A failure made small, run again from what a run left behind, and told as a text that can be pasted."""

import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cases.work import simpler
from mla_conformance.certificate.records import KeptRecord, change_records, is_records, kept_records
from mla_conformance.engine.confirm import minimize
from mla_conformance.engine.messages import Hello
from mla_conformance.engine.supervisor import Supervisor
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import BackendFacts, Check, Record, Status
from mla_conformance.tests.reports import unexplained, write_run
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, judge_one
from mla_conformance.vocabulary.capabilities import read_case, write_case

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


def record(case: Case, status: Status = Status.CRASH, check: str = "") -> Record:
    return Record("Mine", "mine.py:Mine", case.capability, case.id, status, check=check)


def test_every_step_is_simpler_and_valid_and_only_the_same_failure_counts() -> None:
    steps = list(simpler(LARGE))
    assert len(set(steps)) > 20 and LARGE not in steps
    assert all(len(step.q) == len(step.kv) and Case.parse(step.id) == step for step in steps)
    assert list(simpler(Case.of(capability="lse", q=(1,), dims="small", heads=1))) == []

    def judge(case: Case) -> Record:
        if len(case.q) > 1 and max(case.kv) >= 20 and case.data == "needle":
            return record(case, Status.FAIL, Check.LSE)
        return record(case, Status.FAIL, Check.OUTPUT) if case.heads > 1 else record(case)

    found, failure, _, complete = minimize(LARGE, judge, limit=1000)
    assert complete and failure.check == Check.LSE and failure.case == found.id
    expected = Case.of(capability=LARGE.capability, q=(1, 1), kv=(20, 0), heads=1, dims="small", data="needle")
    assert sorted(found.kv) == [0, 20] and replace(found, kv=expected.kv) == expected
    with pytest.raises(InputError, match="expected a case that fails, got pass of chunked_context"):
        minimize(LARGE, lambda case: record(case, Status.PASS), limit=3)


def test_minimising_survives_crashes_and_hangs(wrong: str, tmp_path: Path, told: Any) -> None:
    case, found = tmp_path / "case.json", tmp_path / "found.json"
    write_case(case, Case.parse("lse:dims=small;q=[5,9,2];heads=2;data=needle;pad=2"))
    options = ["--backend", wrong, "--salt", "s1", "--device", "cpu", "--timeout", "2", "--out", str(found)]
    printed = told(0, "minimize", case, *options)
    assert read_case(found) == Case.of(capability="lse", q=(7,), heads=1, dims="small")
    (line,) = [line for line in printed.splitlines() if line.startswith("replay: ")]
    subject = Subject.of(wrong, torch.device("cpu"))
    salted, plain = (judge_one(subject, read_case(found), Context(salt)).message for salt in ("s1", ""))
    assert f"fail: {salted}" in printed and "LSE is" in salted != plain
    command, *arguments = shlex.split(line.removeprefix("replay: "))
    with unexplained():
        assert command == "mla-conformance" and salted.partition(", expected")[0] in told(1, *arguments)


def test_minimising_can_be_ended_and_a_failure_of_a_report_runs_again(
    wrong: str, monkeypatch: Any, told: Any, write_report: Any, refused: Any
) -> None:
    cases = ("lse:q=[3]", "lse:q=[7]")
    records = [Record("Wrong", wrong, "lse", case, Status.FAIL, message=f"wrong in {case}") for case in cases]
    path = write_report("report.json", records)
    with unexplained():
        printed = told(1, "replay", "--report", path, "--failure", 2, "--device", "cpu")
    assert printed.count("wrong: Wrong, 1 case: ") == 1 and "replay 'lse:q=[7]'" in printed
    said = refused("replay", "--report", path, "--failure", 3)
    assert "expected --failure 1 to 2, got 3: 1. wrong in lse:q=[3]; 2. wrong in" in said
    hello = Supervisor.hello

    def hello_to_the_end(supervisor: Supervisor) -> Hello:
        os.kill(os.getpid(), signal.SIGTERM)
        return hello(supervisor)

    monkeypatch.setattr(Supervisor, "hello", hello_to_the_end)
    assert "ended by SIGTERM" in told(143, "minimize", "lse:q=[7]", "--backend", wrong, "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay"], "expected either a case"),
        (["replay", "lse:q=[1]", "--report", "report.json"], "expected either a case"),
        (["replay", "lse:q=[1]"], "expected --backend"),
        (["export", "lse:q=[4]", "--issue", "r.json"], "cannot be combined with a case or --backend"),
        (["export", "lse:q=[4]", "--backend", "EAGER"], "expected a case, --backend NAME and --out FILE.py, or --iss"),
    ],
)
def test_what_a_command_lacks_is_said(refused: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


HANDED_IN = Path(__file__).parents[2] / "fixtures" / "records" / "2026.5.jsonl"
CASE = "decode_lse:call=decode;q=[1];kv=[{}]"
SEEN = "decode: LSE is 16.4 at request 2, query 0, head 1, expected 11.3: 4.83e+04 × its error budget, wrong in 1 row"


@pytest.fixture
def report(tmp_path: Path) -> Path:
    cases = [CASE.format(keys) for keys in (9, 40, 70)]
    seen: dict[str, Any] = {"message": SEEN, "check": "lse", "clause": "4.2", "used": {"lse": 9.0}}
    records = [Record("MINE", "mine.py:Mine", "decode_lse", case, Status.FAIL, **seen) for case in cases]
    records = [each.with_fields(explanation="The LSE is doubled") for each in records]
    known = {"judged": Status.FAIL, "expectation": "file: bug: known", "explanation": "Heads are rotated by one"}
    records[2] = records[2].with_fields(status=Status.EXPECTED_FAILURE, **known)
    facts = BackendFacts("MINE", "mine.py:Mine", versions={"mine": "1.2"})
    environment = {"suite": "2026.5", "device": "NVIDIA H200", "torch": "2.11.0"}
    return write_run(tmp_path / "report.json", records, facts=[facts], environment=environment)


def sections(text: str) -> dict[str, str]:
    title, *parts = re.split(r"^#{1,2} (.*)$", text, flags=re.MULTILINE)[1:]
    return {"title": title, **dict(zip(parts[1::2], parts[2::2], strict=True))}


def test_a_failure_of_a_report_has_all_that_a_maintainer_needs(report: Path, ours: Any, refused: Any) -> None:
    status, printed, _ = ours("export", "--issue", report)
    issue = sections(printed)
    assert status == 0
    assert issue["title"] == "MINE: The LSE is doubled, 9 × its budget (SPEC 4.2)"
    assert "- mine 1.2\n- device NVIDIA H200\n- torch 2.11.0\n" in issue["Versions"]
    assert f"mla-conformance replay '{CASE.format(9)}' --backend mine.py:Mine\n" in issue["Reproducer"]
    assert "within its error budget" in issue["Expected"] and "Here: 11.3\n" in issue["Expected"]
    assert SEEN in issue["Seen"] and "looks like: The LSE is doubled" in issue["Seen"]
    assert f"1 more case fails in this way:\n\n```sh\nmla-conformance replay '{CASE.format(40)}'" in issue["Seen"]
    out = report.with_name("issue.md")
    assert ours("export", "--issue", report, "--failure", 2, "--out", out)[0] == 0
    assert sections(out.read_text("utf-8"))["title"].startswith("MINE: Heads are rotated by one"), "excused, it follows"
    said = refused("export", "--issue", report, "--failure", 3)
    assert "expected --failure 1 to 2, got 3: 1. MINE: The LSE is doubled" in said


@pytest.mark.parametrize("name", ["record.json", "records.jsonl"])
def test_every_finding_of_a_record_has_an_issue(name: str, tmp_path: Path, ours: Any) -> None:
    (record,) = (each.certificate for each in kept_records(HANDED_IN) if each.certificate.backend == "TRITON_MLA")
    if is_records(path := tmp_path / name):
        change_records(path, lambda _: [KeptRecord(record)])
    else:
        path.write_bytes(msgspec.json.encode(record))
    status, printed, _ = ours("export", "--issue", path)
    issue = sections(printed)
    assert status == 0
    assert issue["title"].startswith("TRITON_MLA: bug: TritonMLAImpl.forward_mqa allocates the LSE in the query's")
    assert "- vllm 0.33.0\n" in issue["Versions"] and "- device NVIDIA H100 80GB HBM3\n" in issue["Versions"]
    assert "mla-conformance replay " in issue["Reproducer"] and "LSE is" in issue["Seen"]
