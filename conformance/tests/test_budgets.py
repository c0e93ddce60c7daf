"""Budgets are computed once for a golden result and a choice of roundings, and never for another."""

from dataclasses import replace

import pytest
import torch

from mla_conformance.backends.declaration import Rounding
from mla_conformance.cases.case import Case
from mla_conformance.judging import golden as made
from mla_conformance.judging.golden import Budget, GoldenAttention, golden_attention
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.reference.error_budget import Roundoffs, element_budget
from mla_conformance.roles.table import build_problem

ROUNDING = roundoffs(torch.bfloat16, Rounding(), tolerance(), None, 7, dequantised=False)


def expectation(text: str = "lse:dims=small;heads=2;q=[5,0,2]") -> GoldenAttention:
    return golden_attention(build_problem(Case.parse(text), torch.device("cpu")))


def budget(found: GoldenAttention, allowed: Roundoffs = ROUNDING, deviations: float = 4.75, call: int = 0) -> Budget:
    return found.budgets.of(found.calls[call], found.rows, allowed, deviations)


def test_a_budget_is_computed_once_for_equal_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = expectation()
    first = budget(found)
    monkeypatch.delattr(made, "element_budget")
    assert budget(found, replace(ROUNDING)) is first
    assert first.samples.tolist() == [5, 0, 2] and first.limits.shape == (3,)


def test_other_roundings_deviations_and_results_have_budgets_of_their_own() -> None:
    found, coarse = expectation(), replace(ROUNDING, p=2 * ROUNDING.p)
    first = budget(found)
    assert torch.equal(budget(found, coarse).element, element_budget(found.calls[0], coarse))
    assert bool((budget(found, deviations=3.0).limits < first.limits).all())
    found = expectation("chunked_context:dims=small;heads=2;q=[5,2];kv=[40,9];workspace=32")
    for number, golden in enumerate(found.calls):
        assert torch.equal(budget(found, call=number).element, element_budget(golden, ROUNDING))


def test_only_the_last_budgets_are_kept() -> None:
    found = expectation()
    first = budget(found)
    for deviations in range(10, 30):
        budget(found, deviations=float(deviations))
    again = budget(found)
    assert again is not first and torch.equal(again.element, first.element)
