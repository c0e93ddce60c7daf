"""Merging where a share is empty, huge or refused; the merge law itself is in test_attention_laws."""

import pytest
import torch

from mla_conformance.reference.attention import merge

INF = float("inf")


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF, 1e30])
def test_an_empty_part_is_ignored_whatever_it_holds(garbage: float) -> None:
    empty, full = torch.full((2, 3, 4), garbage), torch.ones(2, 3, 4)
    none, some = torch.full((3, 2), -INF), torch.full((3, 2), 0.5)
    for output, lse in (merge(empty, none, full, some), merge(full, some, empty, none)):
        assert (output == 1).all() and (lse == 0.5).all()
    output, lse = merge(empty, none, empty, none)
    assert (output == 0).all() and (lse == -INF).all()


def test_a_visible_nan_is_not_hidden() -> None:
    output, _ = merge(torch.full((1, 1, 2), torch.nan), torch.zeros(1, 1), torch.ones(1, 1, 2), torch.zeros(1, 1))
    assert output.isnan().all()


def test_result_is_float64_and_exact_at_extreme_lse() -> None:
    output, lse = merge(
        torch.ones(1, 1, 1), torch.full((1, 1), 1e5), torch.full((1, 1, 1), 3.0), torch.full((1, 1), 1e5)
    )
    assert output.dtype == lse.dtype == torch.float64
    assert output.item() == pytest.approx(2.0, rel=1e-10)
    assert lse.item() == pytest.approx(1e5 + 0.6931471805599453, rel=1e-15)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="same queries"):
        merge(torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(3, 2))
