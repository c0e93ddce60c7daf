"""The judges of a top-k and of a preparation: results that are wrong by one thing, and what a backend may declare."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_conformance.backends.declaration import Declaration, SelectionForm, SelectionOrder, Ties
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import build_problem, definition_of, golden_of, judge

CPU = torch.device("cpu")
ROWS = "select:q=[1,1,1];kv=[20,3,0];topk=8;data=integers;packed=1"
TOKENS = "prepare_index:q=[2,1];kv=[5,0];heads=4"


def returned_of(text: str) -> tuple[Problem, Any]:
    """A problem, and what EAGER returns."""
    from mla_conformance.backends.loading import resolve_backend
    from mla_conformance.backends.references import parse_reference

    case = Case.parse(text)
    problem = build_problem(case, CPU)
    kernel = definition_of(case.role).kernel(
        resolve_backend(parse_reference("EAGER"), None, case.role), case, torch.bfloat16, CPU
    )
    (call,) = problem.calls
    call.prepare(kernel)
    return problem, call.invoke(kernel, None)


def verdict(problem: Problem, value: Any, declaration: Declaration | None = None) -> Verdict:
    observation = Observation((Returned(problem.calls[0], value),), None, ())
    return judge(problem, golden_of(problem), observation, declaration or Declaration())


def put(row: int, column: int, value: int) -> Callable[[torch.Tensor], object]:
    return lambda best: best[row].__setitem__(column, value)


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (put(0, 3, 20), Check.SELECTION, "token 20 is selected, expected those below 20"),
        (put(1, 1, -7), Check.SELECTION, "-7 is no token of the request"),
        (put(2, 0, 0), Check.SELECTION, "token 0 is selected, expected those below 0"),
        (put(0, 7, -1), Check.SELECTION, "7 tokens are selected, expected 8 of 20"),
        (lambda best: best[0].__setitem__(7, best[0, 0]), Check.SELECTION, "is selected twice"),
        (lambda best: best[1].copy_(best[1].flip(0)), Check.SELECTION, "-1 stands before a column"),
    ],
)
def test_a_selection_that_is_wrong_by_one_thing(change: Callable[..., object], check: Check, said: str) -> None:
    problem, best = returned_of(ROWS)
    assert verdict(problem, best).status is Status.PASS
    change(best)
    wrong = verdict(problem, best)
    assert wrong.check is check and said in wrong.message, wrong.message


def test_a_left_out_logit_may_be_equal_and_not_greater() -> None:
    problem, best = returned_of("select:q=[1];kv=[30];topk=4")
    values = problem.calls[0].q[0]
    worst = int(values.argmin())
    best[0, 3] = worst
    wrong = verdict(problem, best)
    assert wrong.check is Check.SCORE and f"is left out for token {worst}" in wrong.message
    problem, best = returned_of("select:q=[1];kv=[30];topk=4;data=ones")
    assert verdict(problem, best.new_tensor([[29, 3, 8, 0]])).status is Status.PASS


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"order": SelectionOrder.ASCENDING}, "not in ascending order, which is declared"),
        ({"order": SelectionOrder.DESCENDING}, "not in descending order, which is declared"),
        ({"ties": Ties.FIRST}, "of equal logits not the first are taken"),
        ({"ties": Ties.LAST}, "of equal logits not the last are taken"),
        ({"relative": False}, "is no token of the request"),
    ],
)
def test_what_is_declared_of_a_selection_holds(declared: dict[str, Any], said: str) -> None:
    values = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0, 0.0]])
    problem, best = returned_of("select:q=[1,1];kv=[2,6];topk=3;packed=1")
    problem.calls[0].q[1, 2:] = values
    best[1] = best.new_tensor([0, 4, 2])
    assert verdict(problem, best).status is Status.PASS
    wrong = verdict(problem, best, Declaration(selection=SelectionForm(**declared)))
    assert wrong.check is Check.SELECTION and said in wrong.message, wrong.message


def test_codes_and_scales_that_are_wrong_by_one_thing() -> None:
    problem, (q, k, k_scale, weights) = returned_of(TOKENS)
    assert verdict(problem, (q, k, k_scale, weights)).status is Status.PASS
    moved = q.view(torch.uint8).clone()
    moved[1, 2, 3] ^= 2
    results = {
        "code of queries means": (moved.view(q.dtype), k, k_scale, weights),
        "scale of keys is": (q, k, k_scale * 1.001, weights),
        "scale of queries, as the weights have it, is": (q, k, k_scale, weights * 1.001),
        "code of keys is NaN": (q, torch.full_like(k.float(), torch.nan).to(k.dtype), k_scale, weights),
    }
    for said, value in results.items():
        wrong = verdict(problem, value)
        assert wrong.check is Check.PREPARED and said in wrong.message, wrong.message
    assert verdict(problem, (q, k, k_scale)).check is Check.SHAPE
