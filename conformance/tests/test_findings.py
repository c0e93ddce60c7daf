"""What a failure's own numbers give away, and what they do not: a finding that might be another mistake is not told."""

import math

import pytest
import torch

from mla_conformance.judging.diagnosis import (
    TRANSPOSED,
    UNWRITTEN,
    common_factor,
    explain_form,
    explain_lse,
    explain_output,
)

LSE = torch.tensor([[0.5, 2.0, -1.0], [3.0, 1.5, 0.7], [1.2, -2.0, 4.0]], dtype=torch.float64)
OUTPUT = torch.arange(24, dtype=torch.float64).view(2, 3, 4).sin()


@pytest.mark.parametrize(
    ("lse", "golden", "found"),
    [
        (LSE / math.log(2), LSE, "the LSE is in base 2, expected the natural logarithm"),
        (LSE * math.log(2), LSE, "the LSE is multiplied by ln 2, as if it had been in base 2"),
        (LSE.mT, LSE, TRANSPOSED),
        (LSE * 1.4, LSE, ""),
        (torch.full_like(LSE, 2 / math.log(2)), torch.full_like(LSE, 2.0), ""),
        (LSE[:1, :1] / math.log(2), LSE[:1, :1], ""),
        (LSE + LSE.mT + 0.5, LSE + LSE.mT, ""),
        (torch.where(LSE > 2, torch.nan, LSE / math.log(2)), LSE, ""),
    ],
)
def test_a_wrong_lse(lse: torch.Tensor, golden: torch.Tensor, found: str) -> None:
    assert explain_lse(lse, golden) == found


def test_rows_without_keys_stay_as_they_are() -> None:
    golden = torch.cat((LSE, torch.full((3, 1), -torch.inf, dtype=LSE.dtype)), dim=1)
    assert explain_lse(golden / math.log(2), golden).startswith("the LSE is in base 2")


@pytest.mark.parametrize(
    ("output", "golden", "found"),
    [
        (OUTPUT.roll(1, 1), OUTPUT, "heads are rotated by 1"),
        (1e-3 * OUTPUT.roll(2, 1), 1e-3 * OUTPUT, "heads are rotated by 2"),
        (torch.zeros_like(OUTPUT), OUTPUT, ""),
        (OUTPUT * torch.tensor([1.0, 0.0, 0.0]).view(3, 1), OUTPUT, UNWRITTEN),
        (OUTPUT * torch.tensor([1.0, 0.0, 1.0]).view(3, 1), OUTPUT, ""),
        (OUTPUT[:, :1].expand(2, 3, 4) + 1e-4, OUTPUT[:, :1].expand(2, 3, 4), ""),
        (1e-3 * OUTPUT + 1e-3, 1e-3 * OUTPUT, ""),
        (OUTPUT.roll(1, 0), OUTPUT, ""),
    ],
)
def test_a_wrong_output(output: torch.Tensor, golden: torch.Tensor, found: str) -> None:
    assert explain_output(output, golden) == found


def test_a_common_factor_is_told_of_many_numbers() -> None:
    wrong = torch.ones_like(OUTPUT, dtype=torch.bool)
    assert common_factor(OUTPUT * 1.25, OUTPUT, wrong) == "; got / expected = 1.25 there"
    for got in (OUTPUT + 0.1, OUTPUT * torch.inf):
        assert common_factor(got, OUTPUT, wrong) == ""
    assert common_factor(*(x[:1, :1] for x in (OUTPUT * 1.25, OUTPUT, wrong))) == ""


def test_a_wrong_shape() -> None:
    assert explain_form(torch.Size((9, 2)), torch.Size((2, 9)), "LSE") == TRANSPOSED
    assert explain_form(torch.Size((9, 3)), torch.Size((2, 9)), "LSE") == ""
    assert explain_form(torch.Size((4, 2, 9)), torch.Size((9, 2, 4)), "output") == ""
