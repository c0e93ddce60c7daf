"""Budgets are computed once for a golden result and a choice of roundings; merges weigh by what they round."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_conformance.backends.declaration import Rounding
from mla_conformance.backends.layer.mla_impl import MLACommonImpl
from mla_conformance.backends.references import BackendReference
from mla_conformance.cases.case import Case
from mla_conformance.defects.bases import EagerLayer
from mla_conformance.judging import golden as made
from mla_conformance.judging.golden import Budget, GoldenAttention, golden_attention
from mla_conformance.judging.tolerance import roundoffs, tolerance
from mla_conformance.judging.verdict import Status
from mla_conformance.reference.error_budget import Roundoffs, element_budget
from mla_conformance.roles.table import build_problem
from mla_conformance.trials.context import Context
from mla_conformance.trials.judge_one import judge_one
from mla_conformance.trials.subject import Subject

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


class LastChunkTwice(EagerLayer):
    class impl_class(MLACommonImpl):
        def _gather(self, index: int, kv_cache: Any, attn_metadata: Any, k_scale: Any) -> None:
            """The last chunk of a context is the one before it once more."""
            tokens = attn_metadata.prefill_metadata.chunked_context.seq_tot
            super()._gather(index - (index == len(tokens) - 1), kv_cache, attn_metadata, k_scale)


@pytest.mark.parametrize(("dtype", "chunks", "least"), [("bf16", 16, 4.0), ("fp16", 64, 4.0), ("bf16", 64, 1.0)])
def test_a_layer_whose_last_chunk_is_the_one_before_it_is_wrong_however_many_there_are(
    dtype: str, chunks: int, least: float
) -> None:
    case = (
        f"mixed_batch:call=layer;dtype={dtype};dims=32-16-32-64;heads=2;q=[9];kv=[{64 * chunks}];page=16;workspace=64"
    )
    wrong = BackendReference("LastChunkTwice", f"{LastChunkTwice.__module__}:LastChunkTwice")
    records = [
        judge_one(Subject(backend, torch.device("cpu")), Case.parse(case), Context())
        for backend in (wrong, BackendReference("EAGER", "EAGER"))
    ]
    assert [record.status for record in records] == [Status.FAIL, Status.PASS]
    most = [max(map(float, record.used.values())) for record in records]
    assert most[0] > least and most[1] < 0.5
