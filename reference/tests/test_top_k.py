"""Logits of windows as scores: where they come from, what stands for infinities, subnormals and rows with NaN."""

import pytest
import torch

from mla_conformance.reference.top_k import window_scores


def of(values: list[list[float]], lengths: list[int], starts: list[int] | None = None) -> list[list[float]]:
    rows = torch.tensor(values)
    row_starts = None if starts is None else torch.tensor(starts)
    return window_scores(rows, torch.tensor(lengths), row_starts).scores.tolist()


def test_a_window_is_read_from_its_start_as_far_as_its_length() -> None:
    nothing, nan = -torch.inf, torch.nan
    assert of([[nan, 1, 2, nan], [3, 4, 5, nan]], [2, 3], [1, 0]) == [[1, 2, nothing], [3, 4, 5]]
    assert of([[nan, 7], [nan, nan]], [1, 0], [1, 2]) == [[7], [nothing]]


def test_infinities_are_in_order_and_subnormals_are_zero() -> None:
    ((low, zero, high),) = of([[-torch.inf, 1e-40, torch.inf]], [3])
    assert -torch.inf < low < -3.5e38 and zero == 0.0 and torch.inf > high > 3.5e38


def test_a_row_with_nan_has_no_order_and_may_leave_out_any() -> None:
    found = window_scores(torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, torch.nan]]), torch.tensor([3, 2]))
    assert found.unordered.tolist() == [True, False]
    assert found.fewest(2).tolist() == [0, 2] and found.scores[0].tolist() == [0, 0, 0]


def test_a_window_beyond_the_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="expected windows within 2 columns"):
        window_scores(torch.zeros(1, 2), torch.tensor([2]), torch.tensor([1]))
