"""Budgets are computed once for a golden result and a choice of roundings, and never for another."""

from dataclasses import replace

import pytest
import torch

from mla_conformance.backends.declaration import Rounding
from mla_conformance.cases.case import Case
from mla_conformance.judging import budgets
from mla_conformance.judging.budgets import Budget, budget_of, forget_budgets
from mla_conformance.judging.golden import Expectation, expect, forget
from mla_conformance.judging.rounding import roundoffs
from mla_conformance.judging.tolerance import tolerance
from mla_conformance.problems.build import build_problem
from mla_conformance.reference.error_budget import Roundoffs, element_budget

ROUNDING = roundoffs(torch.bfloat16, Rounding(), tolerance(), None, 7, dequantised=False)


def expectation(text: str = "lse:dims=small;heads=2;q=[5,0,2]") -> Expectation:
    return expect(build_problem(Case.parse(text), torch.device("cpu")))


def budget(found: Expectation, allowed: Roundoffs = ROUNDING, deviations: float = 4.75) -> Budget:
    return budget_of(found.calls[0], found.rows, allowed, deviations)


def test_a_budget_is_computed_once_for_equal_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = budget(expectation())
    monkeypatch.delattr(budgets, "element_budget")
    assert budget(expectation(), replace(ROUNDING)) is first
    assert first.samples.tolist() == [5, 0, 2] and first.limits.shape == (3,)


def test_other_roundings_deviations_and_results_have_budgets_of_their_own() -> None:
    first, coarse = budget(expectation()), replace(ROUNDING, p=2 * ROUNDING.p)
    assert torch.equal(budget(expectation(), coarse).element, element_budget(first.golden, coarse))
    assert bool((budget(expectation(), deviations=3.0).limits < first.limits).all())
    assert budget(expectation("lse:dims=small;heads=2;q=[5,0,2];seed=1")).golden is not first.golden


@pytest.mark.parametrize("anew", [forget, forget_budgets])
def test_a_budget_that_may_have_been_written_over_is_computed_anew(anew: object) -> None:
    first = budget(expectation())
    assert callable(anew)
    anew()
    again = budget(expectation())
    assert again is not first and torch.equal(again.element, first.element)


def test_a_budget_counts_its_golden_result_too() -> None:
    found = budget(expectation())
    assert found.memory > found.element.nbytes + found.golden.output.nbytes
