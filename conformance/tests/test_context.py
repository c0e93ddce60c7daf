"""What a process keeps, and what a salt draws anew."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.engine.request import RequestError, RunRequest
from mla_conformance.judging.verdict import Check, Status
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.drawn import CPU, judged
from mla_conformance.trials import trial as kept
from mla_conformance.trials.trial import Context

CASE = Case.parse("new_tokens:dims=small;heads=2;q=[5,9]")
WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend

class SpoilsItsInputs(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, *arguments, **options):
        returned = super().run_prefill_new_tokens(q, k, v, *arguments, **options)
        for tensor in (q, k, v):
            tensor.fill_(1.0)
        return returned
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """What builds problems and what computes golden results, which counts how often it did."""
    makers = [Mock(wraps=kept.build_problem), Mock(wraps=kept.golden_of)]
    monkeypatch.setattr(kept, "build_problem", makers[0])
    monkeypatch.setattr(kept, "golden_of", makers[1])
    return makers


def test_inputs_and_golden_result_are_made_once_for_two_backends(made: list[Mock]) -> None:
    context = Context()
    assert [judged(name, CASE, context).status for name in ("EAGER", "TORCH_SDPA", "EAGER")] == [Status.PASS] * 3
    assert [each.call_count for each in made] == [1, 1]


def test_what_a_backend_writes_into_its_inputs_no_other_sees(made: list[Mock], tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    context = Context()
    assert judged(f"{tmp_path}/wrong.py:SpoilsItsInputs", CASE, context).check == Check.MUTATED_INPUT
    assert judged("EAGER", CASE, context).status is Status.PASS
    assert [each.call_count for each in made] == [1, 1]


OF_EACH_ROLE = [
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


@pytest.mark.parametrize("case", OF_EACH_ROLE)
def test_every_role_draws_by_the_salt(case: str) -> None:
    one, again, other = contents(case, "one"), contents(case, "one"), contents(case, "other")
    assert one == again and one != other != contents(case, "") != one
    keys = [build_problem(Case.parse(case), CPU, salt).key for salt in ("", "one", "other")]
    assert keys[0] == Case.parse(case).id and len(set(keys)) == 3


@pytest.mark.parametrize("salt", ["two words", "ä", "x" * 65, "a/b", "\n"])
def test_a_salt_that_no_command_line_would_carry_is_refused(salt: str) -> None:
    with pytest.raises(RequestError, match="expected a salt of up to 64 letters"):
        RunRequest.of(salt=salt)


TELLS_ITS_QUERIES = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Wrong(EagerPrefillBackend):
    def run_prefill_new_tokens(self, q, k, v, **options):
        raise RuntimeError(f"it begins with {float(q.flatten()[0])}")
"""


def test_a_worker_draws_by_the_salt_and_the_replay_line_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(TELLS_ITS_QUERIES)
    named = ["--backend", f"{tmp_path / 'wrong.py'}:Wrong", "--salt", "s1"]
    assert main(["replay", "lse:q=[4]", *named, "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    first = float(build_problem(Case.parse("lse:q=[4]"), CPU, "s1").calls[0].q.flatten()[0])
    assert f"it begins with {first}" in said
    assert "· salt s1" in said and f"replay: mla-conformance replay 'lse:q=[4]' {' '.join(named)}" in said
