"""Whose a failure is, what a process keeps from case to case, and what a salt draws anew."""

import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.engine.confirm import compared, comparisons, confirmation
from mla_conformance.engine.request import RunRequest
from mla_conformance.files.whole import InputError
from mla_conformance.judging.record import UNLIKE, Check, Record, Status
from mla_conformance.report.json_report import load_report
from mla_conformance.roles.definition import build_problem
from mla_conformance.tests.drawn import CPU, changed, judged
from mla_conformance.tests.reports import unexplained, write_run
from mla_conformance.trials import trial as kept
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import write_case

FIRST, SECOND, THIRD = CASES = [f"lse:dims=small;heads=2;q=[{tokens}]" for tokens in (3, 4, 5)]

BACKENDS = """
import mla_conformance_test_shared as shared
from mla_conformance.backends.eager import EagerPrefillBackend
class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, *arguments, **options):
        output, lse = super().run_prefill_new_tokens(q, *arguments, **options)
        return output, lse + bool(self.is_wrong(len(q)))
class Always(Wrong):
    def is_wrong(self, tokens): return tokens == 4
class Remembers(Wrong):
    seen = set()
    def is_wrong(self, tokens):
        self.seen.add(tokens)
        return tokens == 5 and 3 in self.seen
class Once(Wrong):
    def is_wrong(self, tokens):
        if tokens == 4 and not shared.once.exists():
            shared.once.touch()
            return True
class Spoils(Wrong):
    def is_wrong(self, tokens): shared.spoiled = True
class Spoiled(Wrong):
    def is_wrong(self, tokens): return shared.spoiled
"""
SHARED = 'import pathlib; spoiled = False; once = pathlib.Path(__file__).with_name("once")'


def failed(case: str, check: str = "lse", seconds: float = 1.0, explanation: str = "") -> Record:
    record = Record("B", "b.py:B", "lse", case, Status.FAIL, seconds, message="LSE is 5", check=check)
    return record.with_fields(explanation=explanation)


def shortened(count: int, needed: set[int], fails: Status = Status.FAIL) -> tuple[int, Record]:
    """How many attempts are made, and their record, if a case needs those of ``count`` earlier ones that are named."""
    own = [("b.py:B", f"lse:q=[{number}]") for number in range(count)]
    confirming, made = confirmation(failed(THIRD), own, explain=True), 1
    attempt = next(confirming)
    while True:
        repeats = {own[number] for number in needed} <= set(attempt.before)
        try:
            attempt = confirming.send(failed(THIRD).with_fields(status=fails if repeats else Status.PASS))
        except StopIteration as settled:
            return made, settled.value
        made += 1


@pytest.mark.parametrize("count", [1, 2, 5, 1000])
def test_one_earlier_case_that_makes_it_fail_is_found_among_many(count: int) -> None:
    for number in {0, count // 3, count // 2, count - 1}:
        made, found = shortened(count, {number}, Status.CRASH)
        assert (found.after, found.confirmation) == ((f"lse:q=[{number}]",), "after"), found.replay
        assert found.status is Status.CRASH and made <= 15


def test_several_earlier_cases_are_found_in_their_order_and_a_long_search_ends() -> None:
    _, found = shortened(30, {3, 20})
    assert found.after == ("lse:q=[3]", "lse:q=[20]")
    made, found = shortened(900, set(range(0, 900, 90)))
    assert made <= 16 and found.confirmation == "after"
    assert {f"lse:q=[{number}]" for number in range(0, 900, 90)} <= set(found.after)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("confirm")
    (folder / "mla_conformance_test_shared.py").write_text(SHARED)
    (folder / "mine.py").write_text(BACKENDS)
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[tuple[str, str], Record]:
    for number, case in enumerate(CASES):
        write_case(folder / "cases" / f"{number}.json", Case.parse(case))
    names = ("Always", "Remembers", "Once", "Spoils", "Spoiled")
    backends = [f"--backend={folder / 'mine.py'}:{name}" for name in names]
    with unexplained(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["certify", *backends, "--cases=cases", "--device=cpu", "-n1", "--out=out"]) == 1
    return {(record.backend, record.case): record for record in load_report(folder / "out").records}


def test_whose_a_failure_is(records: dict[tuple[str, str], Record]) -> None:
    for name, confirmed in (("Always", "alone"), ("Once", "unrepeated")):
        found = records[name, SECOND]
        assert (found.status, found.confirmation, found.after) == (Status.FAIL, confirmed, ())
    spoiled = [records["Spoiled", case] for case in CASES]
    assert {record.status for record in spoiled} == {Status.PASS}
    assert all("Spoils" in record.message for record in spoiled)


def test_a_failure_after_a_case_names_it(records: Any, folder: Path, monkeypatch: Any, told: Any) -> None:
    found = records["Remembers", THIRD]
    assert (found.status, found.confirmation, found.after) == (Status.FAIL, "after", (FIRST,))
    monkeypatch.chdir(folder)
    command, *arguments = shlex.split(found.replay)
    assert command == "mla-conformance" and "--after" in arguments
    with unexplained():
        told(1, *arguments)
    told(0, "replay", found.case, "--backend", found.reference)


def test_what_explains_a_failure_is_tried_on_others_and_changes_nothing_else() -> None:
    explained = failed(FIRST, explanation="It is wrong")
    others = [failed(SECOND, seconds=9.0), failed(THIRD, seconds=2.0)]
    beside = [failed("a", check="call"), failed("b", explanation=UNLIKE), failed("c", seconds=5.0)]
    passed = failed("d").with_fields(status=Status.PASS)
    tasks = comparisons([explained, *others, *beside, passed])
    assert [task.case for task in tasks] == [THIRD, "c"], "quick ones first, and not for ever"
    assert {(task.reported, task.explain, task.fresh) for task in tasks} == {(("It is wrong",), True, False)}
    assert comparisons(others) == []
    first = failed(FIRST)
    again = first.with_fields(message="LSE is 6", seconds=7.0, explanation="It is wrong")
    assert compared(first, again) == first.with_fields(explanation="It is wrong")
    for change in ({"explanation": ""}, {"check": "output"}, {"case": SECOND}, {"status": Status.CRASH, "check": ""}):
        assert compared(first, again.with_fields(**change)) is None


def test_a_replay_says_that_a_failure_was_not_confirmed(tmp_path: Path, monkeypatch: Any, ours: Any) -> None:
    record = failed("lse:q=[4]").with_fields(backend="EAGER", reference="EAGER", confirmation="unrepeated")
    write_run(tmp_path / "report.json", [record])
    monkeypatch.setattr("mla_conformance.commands.replay.run_and_report", lambda run, keep_report: 0)
    status, said, _ = ours("replay", "--report", tmp_path, "--device", "cpu")
    assert status == 0
    assert "the report says of this failure: it did not fail again, neither alone nor after" in said


CASE = Case.parse("new_tokens:dims=small;heads=2;q=[5,9]")


def spoil(run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    returned = run(q, k, v, **options)
    for tensor in (q, k, v):
        tensor.fill_(1.0)
    return returned


def test_what_a_backend_writes_into_its_inputs_no_other_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a problem that is built, and a golden result that is computed, once for both."""
    makers = [Mock(wraps=kept.build_problem), Mock(wraps=kept.golden_of)]
    monkeypatch.setattr(kept, "build_problem", makers[0])
    monkeypatch.setattr(kept, "golden_of", makers[1])
    context, spoils = Context(), changed(EagerPrefillBackend, run_prefill_new_tokens=spoil)
    assert judged(spoils, CASE, context).check == Check.MUTATED_INPUT
    assert judged("EAGER", CASE, context).status is Status.PASS
    assert [each.call_count for each in makers] == [1, 1]


OF_EACH_ROLE = [
    "lse:dims=small;heads=2;q=[5,9]",
    "chunked_context:call=chunked_context;dims=small;heads=2;q=[3];kv=[40];page=16;workspace=32",
    "decode:call=decode;dims=small;heads=2;q=[1,1];kv=[40,9];page=16",
    "mixed_batch:call=layer;dims=small;heads=2;q=[4,1];kv=[0,9];decodes=1;page=16",
    "sparse_decode:call=sparse_decode;heads=16;q=[1];kv=[40];page=16;topk=16",
    "indexer_logits:call=index_logits;q=[1];kv=[40];page=16",
]


def contents(case: str, salt: str) -> list[bytes]:
    tensors = [tensor for tensor in build_problem(Case.parse(case), CPU, salt).tensors() if tensor.dim()]
    return [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("case", OF_EACH_ROLE)
def test_every_role_draws_by_the_salt(case: str) -> None:
    one, again, other = contents(case, "one"), contents(case, "one"), contents(case, "other")
    assert one == again and one != other != contents(case, "") != one
    keys = [build_problem(Case.parse(case), CPU, salt).key for salt in ("", "one", "other")]
    assert keys[0] == Case.parse(case).id and len(set(keys)) == 3


@pytest.mark.parametrize("salt", ["two words", "ä", "x" * 65, "a/b", "\n"])
def test_a_salt_that_no_command_line_would_carry_is_refused(salt: str) -> None:
    with pytest.raises(InputError, match="expected a salt of up to 64 letters"):
        RunRequest.of(salt=salt)


TELLS_ITS_QUERIES = """
from mla_conformance.backends.eager import EagerPrefillBackend
class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, **options):
        print("\\x1b[2Jseen:", q.shape)
        raise RuntimeError(f"it begins with {float(q.flatten()[0])}")
"""


def test_a_worker_draws_by_the_salt_and_the_replay_line_names_it(tmp_path: Path, ours: Any) -> None:
    (tmp_path / "wrong.py").write_text(TELLS_ITS_QUERIES)
    named = ["--backend", f"{tmp_path / 'wrong.py'}:Wrong", "--salt", "s1"]
    status, said, beside = ours("replay", "lse:q=[4]", *named, "--device", "cpu")
    printed = beside.partition("what the kernel printed last:\n")[2]
    assert "  \\x1b[2Jseen: torch.Size([4, 4, 192])" in printed and "seen" not in said
    first = float(build_problem(Case.parse("lse:q=[4]"), CPU, "s1").calls[0].q.flatten()[0])
    assert status == 1 and f"it begins with {first}" in said
    assert "· salt s1" in said and f"replay: mla-conformance replay 'lse:q=[4]' {' '.join(named)}" in said
