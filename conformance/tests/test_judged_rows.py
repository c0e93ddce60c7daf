"""Chosen rows: which they are, what they find, and what is said of them."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.cases.case import Call, Case
from mla_conformance.judging import judged_rows
from mla_conformance.judging.golden import golden_attention
from mla_conformance.judging.judged_rows import choose_rows
from mla_conformance.judging.record import detection
from mla_conformance.judging.verdict import Status
from mla_conformance.reference.attention import attention
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.drawn import CPU, judged
from mla_conformance.trials.trial import Context

CASES = [
    "new_tokens:dims=small;heads=2;q=[400,0,300]",
    "context_chunk:dims=small;heads=2;q=[400,300];kv=[65,9]",
    "chunked_context:dims=small;heads=2;q=[400,300];kv=[65,0]",
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem is too large to be judged whole."""
    monkeypatch.setattr(judged_rows, "FULL_OPERATIONS", {"cpu": 0.0})
    monkeypatch.setattr(judged_rows, "TELLING_ROWS", 40)
    monkeypatch.setattr(judged_rows, "DRAWN_ROWS", 60)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("case", CASES)
def test_ends_and_edges_are_judged_and_the_choice_is_the_same_every_time(case: str) -> None:
    rows = choose_rows(build_problem(Case.parse(case), CPU))
    assert rows == choose_rows(build_problem(Case.parse(case), CPU))
    assert rows.numbers and len(rows.numbers) == 96 and list(rows.numbers) == sorted(set(rows.numbers))
    last = 699
    assert {0, 399, 400, last, 15, 16, 31, 32, 400 + 15, 400 + 16} <= set(rows.numbers)
    assert rows.query_start_loc[-1] == 700 and rows.drawn == 60
    assert choose_rows(build_problem(Case.parse(f"{case};seed=1"), CPU)).numbers != rows.numbers


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("case", CASES)
def test_the_golden_states_are_those_of_the_rows(case: str) -> None:
    problem = build_problem(Case.parse(f"{case};seed=3"), CPU)
    found = golden_attention(problem)
    call = problem.attention[0]
    whole = attention(
        call.q,
        call.k,
        call.v,
        query_start_loc=problem.query_start_loc,
        key_start_loc=call.key_start_loc,
        scale=problem.case.softmax_scale,
        causal=problem.case.call != Call.CONTEXT_CHUNK,
    )
    torch.testing.assert_close(found.calls[0].output, found.rows.pick(whole.output), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.calls[0].lse, found.rows.pick(whole.lse, dim=1), rtol=1e-12, atol=1e-13)
    record = judged("EAGER", case, Context())
    assert record.status is Status.PASS and record.sampled == {"rows": 96, "of": 700, "drawn": 60}


class WrongRow(EagerPrefillBackend):
    row = 415
    value = 1.0

    def run_prefill_context_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output, lse = super().run_prefill_context_chunk(*args, **kwargs)
        output[self.row] += self.value
        return output, lse


class NanRow(WrongRow):
    row = 200
    value = torch.nan


@pytest.mark.usefixtures("few")
def test_a_wrong_row_is_named_by_its_place_in_the_batch_and_none_may_hold_nan() -> None:
    found = judged(WrongRow, CASES[1], Context())
    assert found.status is Status.FAIL and "request 1, query 15" in found.message
    assert "wrong in 1 of 2 requests, 1 of 96 rows" in found.message

    found = judged(NanRow, CASES[1], Context())  # in a row that is not judged
    assert found.status is Status.FAIL and "output is nan at request 0, query 200" in found.message


def test_detection_counts_drawn_rows_only() -> None:
    assert detection(384, 0.01) == pytest.approx(0.979, abs=1e-3)
    assert detection(0, 0.5) == 0.0 and detection(10, 1.0) == 1.0
