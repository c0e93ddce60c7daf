"""A salt draws every input anew: the same for the same salt, others for another, and none changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.engine.messages import WorkerJudged, decode, encode
from mla_conformance.engine.request import RequestError, RunRequest
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Status
from mla_conformance.report.loading import load_report
from mla_conformance.roles.table import build_problem

CPU = torch.device("cpu")
CASES = [
    "lse:dims=small;heads=2;q=[5,9]",
    "chunked_context:call=chunked_context;dims=small;heads=2;q=[3];kv=[40];page=16;workspace=32",
    "decode:call=decode;dims=small;heads=2;q=[1,1];kv=[40,9];page=16",
    "mixed_batch:call=layer;dims=small;heads=2;q=[4,1];kv=[0,9];decodes=1;page=16",
    "sparse_decode:call=sparse_decode;heads=16;q=[1];kv=[40];page=16;topk=16",
    "indexer_logits:call=index_logits;q=[1];kv=[40];page=16",
]


def contents(case: str, salt: str) -> list[bytes]:
    problem = build_problem(Case.parse(case), CPU, salt)
    return [
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in problem.tensors() if tensor.dim()
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_role_draws_by_the_salt(case: str) -> None:
    one, again, other = contents(case, "one"), contents(case, "one"), contents(case, "other")
    assert one == again and one != other != contents(case, "") != one
    keys = [build_problem(Case.parse(case), CPU, salt).key for salt in ("", "one", "other")]
    assert keys[0] == Case.parse(case).id and len(set(keys)) == 3


def test_a_replay_line_names_the_salt() -> None:
    record = Record("B", "B", "lse", "lse:q=[4]", Status.FAIL, salt="a.b-1")
    assert record.replay == "mla-conformance replay 'lse:q=[4]' --backend B --salt a.b-1"
    assert "--salt" not in record.with_fields(salt="").replay
    assert decode(encode(WorkerJudged(record)), WorkerJudged).record == record


def test_a_report_keeps_the_salt_of_its_failures(write_report: Callable[..., Path]) -> None:
    failed = Record("B", "B", "lse", "lse:q=[4]", Status.FAIL, message="m", check="lse", salt="s1")
    path = write_report("salted.json", [failed], salt="s1")
    assert load_report(path).records[0].replay == failed.replay


@pytest.mark.parametrize("salt", ["two words", "ä", "x" * 65, "a/b", "\n"])
def test_a_salt_that_no_command_line_would_carry_is_refused(salt: str) -> None:
    with pytest.raises(RequestError, match="expected a salt of up to 64 letters"):
        RunRequest.of(salt=salt)


WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, **options):
        raise RuntimeError(f"it begins with {float(q.flatten()[0])}")
"""


def test_a_worker_draws_by_the_salt_and_the_replay_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    named = ["--backend", f"{tmp_path / 'wrong.py'}:Wrong", "--salt", "s1"]
    assert main(["replay", "lse:q=[4]", *named, "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    first = float(build_problem(Case.parse("lse:q=[4]"), CPU, "s1").calls[0].q.flatten()[0])
    assert f"it begins with {first}" in said
    assert "· salt s1" in said and f"replay: mla-conformance replay 'lse:q=[4]' {' '.join(named)}" in said
