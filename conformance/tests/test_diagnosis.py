"""What a failure is said to look like: known defects by name, other ones as unknown, and how far an error reaches."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.references import BackendReference
from mla_conformance.cases.capabilities import CAPABILITIES, Tier
from mla_conformance.cases.case import Case
from mla_conformance.cli import main
from mla_conformance.defects.explain import explain, explanations
from mla_conformance.defects.known import KnownDefect, known_defects
from mla_conformance.defects.suspects import SUSPECTS
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.locate import extent
from mla_conformance.judging.verdict import Check, Verdict
from mla_conformance.trials.execute import execute, failing
from mla_conformance.trials.trial import Trial

CPU = torch.device("cpu")
DEFECTS = known_defects()
UNKNOWN = "unlike every known defect"


def tried(kernel: type[KernelBackend], case: Case) -> tuple[Trial, Verdict]:
    """A kernel's trial of a case and the verdict over it."""
    subject = Subject(BackendReference(kernel.__name__, f"{kernel.__module__}:{kernel.__qualname__}"), CPU)
    trial = Trial(subject, case)
    return trial, execute(trial)


def first_failure(kernel: Any, capability: str) -> tuple[Trial, Verdict]:
    trials = (tried(kernel, case) for case in CAPABILITIES[capability].select(Tier.FULL))
    return next((trial, verdict) for trial, verdict in trials if failing(verdict))


@pytest.mark.parametrize("entry", DEFECTS.values(), ids=DEFECTS)
def test_a_known_defect_is_explained_by_itself_or_its_family(entry: KnownDefect) -> None:
    best = explanations(*first_failure(entry.kernel, entry.killed_by))[0]
    assert best.family == entry.family and best.fit > 0.99
    assert str(best).startswith(f"looks like {best.name} (")


@pytest.mark.parametrize("suspect", SUSPECTS, ids=[suspect.__name__ for suspect in SUSPECTS])
def test_every_suspect_is_wrong_somewhere_and_says_how(suspect: type[EagerPrefillBackend]) -> None:
    assert suspect.__doc__ and SUSPECTS[suspect]
    cases = [
        "new_tokens:dims=small;heads=3;q=[70,130];scale=50",
        "context_chunk:dims=small;heads=3;q=[5,3,2];kv=[129,40,0]",
    ]
    assert any(failing(tried(suspect, Case.parse(text))[1]) for text in cases)


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


@pytest.mark.parametrize("kernel", [OddColumnsNegated, LseOfOddHeads, SquaredWeights, ValuesBackwards])
def test_a_new_defect_is_killed_and_said_to_be_new(kernel: type[EagerPrefillBackend]) -> None:
    trial, verdict = tried(kernel, Case.parse("new_tokens:dims=small;heads=3;q=[9,40]"))
    assert failing(verdict)
    assert explain(trial, verdict) == UNKNOWN


HALF_WRONG = """
from mla_conformance.backends.eager import EagerPrefillBackend

class HalfWrong(EagerPrefillBackend):
    def _finish(self, state):
        output, lse = super()._finish(state)
        return output, lse / {divisor}
"""


@pytest.mark.parametrize(("divisor", "said"), [("0.6931472", "looks like Base2Lse ("), ("1.02", UNKNOWN)])
def test_a_failing_run_prints_what_it_looks_like(
    divisor: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half.py").write_text(HALF_WRONG.format(divisor=divisor))
    options = ["--tier", "smoke", "--device", "cpu", "-n", "1", "--capability", "lse", "--out", str(tmp_path)]
    assert main(["certify", *options, "--backend", f"{tmp_path / 'half.py'}:HalfWrong"]) == 1
    failure, explanation, replay, *_ = capsys.readouterr().out.partition("FAIL HalfWrong lse")[2].splitlines()
    assert failure.startswith(" · case lse:") and replay.startswith("     replay: mla-conformance replay")
    assert explanation.startswith(f"     {said}")


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
    _, verdict = tried(HalvesItsQueries, Case.parse(text))
    assert verdict.check is Check.MUTATED_INPUT and "the call changed q of" in verdict.message
