"""The golden scores of an indexer against its definition and float32, and logits of windows as scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.error_budget import Roundoffs
from mla_conformance.reference.index_scores import index_scores, window_scores

EXACT = {"p": 0.0, "p_floor": 0.0, "partials": 0.0, "output": 0.0, "output_floor": 0.0, "row_sum": 0.0, "exp": 0.0}
LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=4)


def batch(lengths: list[tuple[int, int]], seed: int = 0) -> dict:
    """Requests of so many queries behind so much context."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = sum(q for q, _ in lengths), sum(q + kv for q, kv in lengths)
    starts = [[sum(size(x) for x in lengths[:i]) for i in range(len(lengths) + 1)] for size in (lambda x: x[0], sum)]
    return {
        "q": torch.randn(queries, 3, 8, generator=generator),
        "weights": torch.randn(queries, 3, generator=generator),
        "k": torch.randn(keys, 8, generator=generator),
        "query_start_loc": starts[0],
        "key_start_loc": starts[1],
    }


@settings(max_examples=20, deadline=None)
@given(LENGTHS, st.integers(0, 99))
def test_every_score_is_the_definition(lengths: list[tuple[int, int]], seed: int) -> None:
    made = batch(lengths, seed)
    found = index_scores(**made)
    row = 0
    for (queries, context), first in zip(lengths, made["key_start_loc"], strict=False):
        for query in range(queries):
            assert int(found.bounds[row]) == context + query + 1
            for token in range(context + query + 1):
                q, k = made["q"][row].double(), made["k"][first + token].double()
                want = sum(made["weights"][row, head].double() * max(0.0, float(q[head] @ k)) for head in range(3))
                assert float(found.scores[row, token]) == pytest.approx(float(want), abs=1e-12)
            assert bool((found.scores[row, context + query + 1 :] == -torch.inf).all())
            row += 1


def test_rows_can_be_chosen_and_workspaces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batch([(3, 5), (2, 0), (4, 9)])
    whole = index_scores(**made)
    monkeypatch.setattr("mla_conformance.reference.attention.WORKSPACE_ELEMENTS", 1)
    some = index_scores(**made, rows=[1, 4, 8])
    width = some.scores.shape[1]
    torch.testing.assert_close(some.scores, whole.scores[[1, 4, 8], :width], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(some.magnitude, whole.magnitude[[1, 4, 8], :width], rtol=1e-13, atol=1e-13)


def test_a_request_without_keys_sees_none_and_shapes_that_do_not_fit_are_refused() -> None:
    made = batch([(2, 3), (1, 0)])
    found = index_scores(**{**made, "k": made["k"][:5], "key_start_loc": [0, 5, 5]})
    assert found.bounds.tolist() == [4, 5, 0]
    assert bool((found.scores[2] == -torch.inf).all()) and bool((found.magnitude[2] == 0).all())
    with pytest.raises(ValueError, match=r"expected q \[T, H, D\], weights \[T, H\] and k \[S, D\], got \(3, 3, 8\)"):
        index_scores(**{**made, "k": made["k"][:, :7]})


def test_float32_stays_within_the_budget_and_a_coarser_key_does_not() -> None:
    made = batch([(4, 60)], seed=3)
    found = index_scores(**made)
    allowed = found.budget(Roundoffs(**EXACT, accumulation=32.0))

    def error(k: torch.Tensor) -> torch.Tensor:
        dots = torch.einsum("thd,sd->ths", made["q"], k).relu()
        scores = torch.einsum("th,ths->ts", made["weights"], dots).double()
        return (scores - found.scores).abs().masked_fill(~found.visible, 0.0)

    assert bool((error(made["k"]) <= allowed).all())
    rounded = error(made["k"].bfloat16().float())
    assert bool((rounded > allowed).any())
    assert bool((rounded <= found.budget(Roundoffs(**EXACT, accumulation=32.0, keys=2.0**-8))).all())


def scored(values: list[list[float]], lengths: list[int], starts: list[int] | None = None) -> list[list[float]]:
    rows = torch.tensor(values)
    row_starts = None if starts is None else torch.tensor(starts)
    return window_scores(rows, torch.tensor(lengths), row_starts).scores.tolist()


def test_a_window_is_read_from_its_start_as_far_as_its_length() -> None:
    nothing, nan = -torch.inf, torch.nan
    assert scored([[nan, 1, 2, nan], [3, 4, 5, nan]], [2, 3], [1, 0]) == [[1, 2, nothing], [3, 4, 5]]
    assert scored([[nan, 7], [nan, nan]], [1, 0], [1, 2]) == [[7], [nothing]]


def test_infinities_are_in_order_and_subnormals_are_zero() -> None:
    ((low, zero, high),) = scored([[-torch.inf, 1e-40, torch.inf]], [3])
    assert -torch.inf < low < -3.5e38 and zero == 0.0 and torch.inf > high > 3.5e38


def test_a_row_with_nan_has_no_order_and_may_leave_out_any() -> None:
    found = window_scores(torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, torch.nan]]), torch.tensor([3, 2]))
    assert found.unordered.tolist() == [True, False]
    assert found.fewest(2).tolist() == [0, 2] and found.scores[0].tolist() == [0, 0, 0]


def test_a_window_beyond_the_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="expected windows within 2 columns"):
        window_scores(torch.zeros(1, 2), torch.tensor([2]), torch.tensor([1]))
