"""Rotary embedding against complex multiplication, and its defining law."""

from typing import Any

import pytest
import torch

from mla_conformance.reference.rope import Rotation, rope


def test_interleaved_is_complex_multiplication(normal: Any) -> None:
    x, positions = normal(1, 5, 3, 8), torch.tensor([0, 1, 7, 1000, 163839])
    frequency = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequency)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn[:, None]).flatten(-2)
    torch.testing.assert_close(rope(x, positions, Rotation.plain(8, interleaved=True)), expected, rtol=1e-9, atol=1e-9)


def test_the_styles_differ_by_a_permutation(normal: Any) -> None:
    x, positions = normal(2, 5, 8), torch.arange(5) * 3
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    halves = rope(x[:, order], positions, Rotation.plain(8, interleaved=False))
    torch.testing.assert_close(
        halves, rope(x, positions, Rotation.plain(8, interleaved=True))[:, order], rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_distance_alone(normal: Any, interleaved: bool) -> None:
    q, k = normal(3, 1, 8), normal(4, 1, 8)
    rotation = Rotation.plain(8, base=500.0, interleaved=interleaved)

    def product(q_position: int, k_position: int) -> float:
        turned_q = rope(q, torch.tensor([q_position]), rotation)
        return (turned_q * rope(k, torch.tensor([k_position]), rotation)).sum().item()

    assert product(17, 12) == pytest.approx(product(1005, 1000), rel=1e-11)
    assert product(0, 0) == pytest.approx((q * k).sum().item(), rel=1e-14)
    assert product(17, 12) != pytest.approx(product(17, 13), rel=1e-3)


def test_shapes_and_refusals(normal: Any) -> None:
    nothing, four = Rotation.plain(0, interleaved=True), Rotation.plain(4, interleaved=False)
    assert rope(torch.ones(2, 3, 0), torch.arange(2), nothing).shape == (2, 3, 0)
    assert rope(torch.ones(2, 4, dtype=torch.bfloat16), torch.arange(2), four).dtype == torch.float64
    with pytest.raises(ValueError, match="even number of elements and a base > 0, got 3"):
        Rotation.plain(3, interleaved=True)
    with pytest.raises(ValueError, match="last dimension of 4, two for each frequency, got \\(2, 6\\)"):
        rope(torch.ones(2, 6), torch.arange(2), four)
    with pytest.raises(ValueError, match="one position a token"):
        rope(torch.ones(2, 4), torch.arange(3), four)
    with pytest.raises(ValueError, match="frequencies of a rotation must be finite and above 0"):
        Rotation(frequencies=(1.0, 0.0), interleaved=True)
