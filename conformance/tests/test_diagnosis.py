"""What a failure is said to look like: known defects by name, other ones as unknown, and how far an error reaches."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.references import BackendReference
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects.explain import explain, explanations
from mla_conformance.defects.known import known_defects
from mla_conformance.defects.suspects import SUSPECTS
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.locate import extent
from mla_conformance.judging.record import Record
from mla_conformance.judging.verdict import Check
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judged_trial
from mla_conformance.trials.trial import Trial

CONTEXT = Context()
UNKNOWN = "unlike every known defect"
SUSPECT_CASES = (
    "new_tokens:dims=small;heads=3;q=[70,130];scale=50",
    "empty_rows:call=context_chunk;dims=small;heads=3;q=[0,3,4];kv=[9,0,33]",
)
CASES = (
    *SUSPECT_CASES,
    "merge_states:call=chunked_context;dims=small;heads=2;q=[5,9,3];kv=[64,0,130];workspace=96;merge=own",
    "call_order:dims=small;heads=2;q=[5,9]",
    "shift_invariance:dims=small;heads=2;q=[5,40];data=negative",
    "token_counts:dims=small;heads=2;q=[3x12];data=needle",
    "fp8_operands:dims=small;heads=2;dtype=e4m3;q=[1,7,64];data=needle",
    "quant_output_fp8:dims=small;heads=2;q=[5,33];lse=0;quant=fp8;pad=3",
    "decode:dims=small;heads=2;q=[1,1];kv=[130,40];page=16;data=extreme_logits;lse=0",
    "decode_multi_token:call=decode;dims=small;heads=2;q=[3,1,2];kv=[130,40,0];page=16",
    "kv_cache_fp8:call=decode;dims=small;heads=2;q=[5,1];kv=[130,40];page=64;cache=fp8;kscale=31000",
    "dcp:call=decode;dims=small;heads=2;q=[4,4];kv=[70,14];page=16;ranks=2;interleave=16;data=needle",
    "cache_write:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[12,15];decodes=1;cache=fp8;kscale=31000",
    "mixed_batch:call=layer;dims=32-16-32-64;heads=2;q=[2,1,9,5];kv=[30,4,40,20];data=needle;decodes=2;"
    "order=decodes_first",
    "weight_absorption:call=layer;dims=32-16-32-64;heads=2;q=[5,1];kv=[0,33];decodes=1",
)
"""Small cases on which most known defects fail, and no two of different families alike."""


def located(kernel: type) -> str:
    return f"{kernel.__module__}:{kernel.__qualname__}"


def families(role: Role) -> dict[str, str]:
    """The family of each suspect and known defect of a role, by what loads it."""
    suspects = {located(kernel): family for kernel, family in SUSPECTS.items() if role is Role.PREFILL}
    return suspects | {entry.reference: entry.family for entry in known_defects().values() if role in entry.roles}


@cache
def tried(reference: str, case: str) -> tuple[Trial, Record]:
    """A kernel's trial of a case and its record."""
    backend = BackendReference(reference.rpartition(":")[2], reference)
    return judged_trial(Subject(backend, torch.device("cpu")), Case.parse(case), CONTEXT)


@pytest.fixture
def judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate is judged once on a case, however many failures it is compared with."""

    def shared(subject: Subject, case: Case, _: Context) -> tuple[Trial, Record]:
        return tried(subject.backend.reference, case.id)

    monkeypatch.setattr("mla_conformance.defects.explain.judged_trial", shared)


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("text", CASES)
def test_what_fails_is_explained_by_itself_or_its_family(text: str) -> None:
    case = Case.parse(text)
    trials = {reference: tried(reference, case.id) for reference in families(case.role)}
    failures = {reference: found for reference, found in trials.items() if found[1].failed}
    assert failures
    for reference, found in failures.items():
        best = explanations(*found)[0]
        assert best.family == families(case.role)[reference] and best.fit > 0.99, f"{reference} {best}"
        assert str(best).startswith(f"looks like {best.name} (")


@pytest.mark.parametrize("suspect", SUSPECTS, ids=[suspect.__name__ for suspect in SUSPECTS])
def test_every_suspect_is_wrong_somewhere_and_says_how(suspect: type[EagerPrefillBackend]) -> None:
    assert suspect.__doc__ and SUSPECTS[suspect]
    assert any(tried(located(suspect), text)[1].failed for text in SUSPECT_CASES)


def test_most_known_defects_fail_on_the_cases_that_they_are_told_apart_by() -> None:
    cases = [Case.parse(text) for text in CASES]
    defects = known_defects().values()
    failing = [
        any(e.reference in families(c.role) and tried(e.reference, c.id)[1].failed for c in cases) for e in defects
    ]
    assert sum(failing) > len(failing) / 2


class OddColumnsNegated(EagerPrefillBackend):
    """Every other column has the wrong sign."""

    def _finish(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = super()._finish(state)
        return output * torch.where(torch.arange(output.shape[-1]) % 2 == 0, 1.0, -1.0), lse


class LseOfOddHeads(EagerPrefillBackend):
    """A quarter is added to the LSE of odd heads."""

    def _finish(self, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = super()._finish(state)
        return output, lse + 0.25 * (torch.arange(lse.shape[0]) % 2).unsqueeze(-1)


class SquaredWeights(EagerPrefillBackend):
    """Weights are squared after the softmax's shift."""

    def _exp(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().square()


class ValuesBackwards(EagerPrefillBackend):
    """A request's values are read from the last to the first."""

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        return super()._attend(q, k, v.flip(0), causal)


@pytest.mark.usefixtures("judged_once")
@pytest.mark.parametrize("kernel", [OddColumnsNegated, LseOfOddHeads, SquaredWeights, ValuesBackwards])
def test_a_new_defect_is_killed_and_said_to_be_new(kernel: type[EagerPrefillBackend]) -> None:
    trial, record = tried(located(kernel), SUSPECT_CASES[0])
    assert record.failed
    assert explain(trial, record) == UNKNOWN


WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend

class Known(EagerPrefillBackend):
    divisor = 0.6931472

    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / self.divisor

class New(Known):
    divisor = 1.02
"""


def test_a_failing_run_prints_what_it_looks_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    backends = [word for name in ("Known", "New") for word in ("--backend", f"{tmp_path / 'wrong.py'}:{name}")]
    options = ["--tier", "smoke", "--device", "cpu", "-n", "1", "--capability", "lse", "--out", str(tmp_path / "out")]
    assert main(["certify", *options, *backends]) == 1
    printed = capsys.readouterr().out
    assert "about Known lse: looks like Base2Lse (" in printed
    assert f"about New lse: {UNKNOWN}" in printed


def test_an_extent_counts_requests_rows_heads_and_columns() -> None:
    rows = JudgedRows((0, 4, 4, 9))
    wrong = torch.zeros(9, 3, 16, dtype=torch.bool)
    wrong[5:7, 1, 3:6] = True
    assert extent(rows, wrong) == "wrong in 1 of 3 requests, 2 of 9 rows, 1 of 3 heads, 3 of 16 columns"
    assert extent(rows, wrong[..., 0] | True) == "wrong in 2 of 3 requests, 9 of 9 rows, 3 of 3 heads"


class HalvesItsQueries(EagerPrefillBackend):
    """Right results, and queries that are left halved."""

    def run_prefill_new_tokens(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().run_prefill_new_tokens(q, *args, **kwargs)
        q.mul_(0.5)
        return result

    def run_prefill_context_chunk(self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        result = super().run_prefill_context_chunk(chunk_idx, q, k, v)
        q.mul_(0.5)
        return result


@pytest.mark.parametrize(
    "text",
    [
        "new_tokens:dims=small;q=[5,9]",
        "new_tokens:dims=small;q=[5,9];seed=77;layout=sliced",
        "context_chunk:dims=small;q=[5,9];kv=[40,3]",
        "call_order:dims=small;q=[5,9]",
        "batch_invariance:dims=small;q=[5,9]",
    ],
)
def test_changed_inputs_do_not_change_what_is_expected(text: str) -> None:
    _, record = tried(located(HalvesItsQueries), text)
    assert record.check == Check.MUTATED_INPUT and "the call changed q of" in record.message
