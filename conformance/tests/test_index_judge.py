"""The judge of an indexer: what it says of selections and scores that are wrong by one thing, and of ties."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.indexer.role import golden_scores
from mla_conformance.roles.table import build_problem, judge

CPU = torch.device("cpu")
TOPK = "indexer_topk:call=index_topk;heads=4;q=[2,1];kv=[20,3];topk=8"


def built(text: str) -> tuple[Problem, Any, torch.Tensor]:
    """A problem, its golden scores, and the best tokens of each row in order, -1 behind them."""
    problem = build_problem(Case.parse(text), CPU)
    (golden,) = golden_scores(problem).calls
    best = golden.scores.topk(8, dim=1)
    return problem, golden, best.indices.masked_fill(best.values == -torch.inf, -1).int()


def verdict(problem: Problem, value: Any) -> Verdict:
    observation = Observation((Returned(problem.calls[0], value),), None, ())
    return judge(problem, golden_scores(problem), observation, Declaration())


def test_the_order_of_a_selection_is_free() -> None:
    problem, _, best = built(TOPK)
    assert verdict(problem, best).status is verdict(problem, best.flip(1)).status is Status.PASS


def out_of_bound(best: torch.Tensor) -> None:
    best[0, 3] = 21


def foreign(best: torch.Tensor) -> None:
    best[2, 1] = -7


def twice(best: torch.Tensor) -> None:
    best[1, 7] = best[1, 0]


def missing(best: torch.Tensor) -> None:
    best[1, 0] = -1


def invented(best: torch.Tensor) -> None:
    best[2, 7] = 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (out_of_bound, "token 21 is selected, expected those below 21, at request 0, query 0"),
        (foreign, "-7 is no token of the request, at request 1, query 0"),
        (twice, "is selected twice, at request 0, query 1"),
        (missing, "7 tokens are selected, expected 8 of 22, at request 0, query 1"),
        (invented, "token 4 is selected, expected those below 4, at request 1, query 0"),
    ],
)
def test_what_is_named_is_judged_exactly(wrong: Callable[[torch.Tensor], None], said: str) -> None:
    problem, _, best = built(TOPK)
    wrong(best)
    found = verdict(problem, best)
    assert found.check is Check.SELECTION and said in found.message


def test_slots_are_those_of_the_own_request() -> None:
    problem, _, best = built(f"{TOPK.replace('indexer_topk', 'index_mapping')};space=slot")
    slots: Any = problem.calls[0]
    firsts = torch.tensor([0, 0, 22])[:, None]
    reported = torch.where(best < 0, -1, slots.slots[(best + firsts).clamp(max=25).long()]).int()
    assert verdict(problem, reported).status is Status.PASS
    reported[0, 0] = slots.slots[22]
    assert "is no token of the request, at request 0, query 0" in verdict(problem, reported).message
    reported[0, 0] = slots.given["k"].shape[0] * slots.given["k"].shape[1]
    assert "is no token of the request" in verdict(problem, reported).message


def test_a_worse_token_is_accepted_only_within_the_budget_of_both() -> None:
    problem, golden, best = built(TOPK)
    ninth = golden.scores[0].topk(9).indices[8]
    best[0, 7] = ninth
    found = verdict(problem, best)
    assert found.check is Check.SCORE and f"for token {int(ninth)} with" in found.message
    call: Any = problem.calls[0]
    call.weights[0] = 0.0  # now any eight tokens are as good
    assert verdict(problem, best).status is Status.PASS


def test_ties_are_free() -> None:
    problem, golden, _ = built(f"{TOPK};data=zero_keys")
    order = golden.visible.sum(dim=1, keepdim=True) - 1 - torch.arange(8)
    assert verdict(problem, order.clamp(min=-1).int()).status is Status.PASS


def test_scores_count_below_the_bound_alone() -> None:
    problem, golden, _ = built("indexer_logits:call=index_logits;heads=4;q=[2,1];kv=[20,3];inflate=2")
    logits = torch.full(problem.calls[0].result_shape, torch.nan)
    logits[:, : golden.scores.shape[1]] = golden.scores.float().nan_to_num(neginf=torch.nan)
    assert logits.shape == (3, 44)
    assert verdict(problem, logits).status is Status.PASS
    logits[1, 21] = torch.nan
    found = verdict(problem, logits)
    assert found.check is Check.SCORE and "score is nan of token 21 at request 0, query 1" in found.message
    assert verdict(problem, logits[:, :-1]).check is Check.SHAPE
    assert verdict(problem, logits.double()).check is Check.DTYPE
