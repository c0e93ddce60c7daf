"""Rotary embedding and YaRN, and index queries and keys before they are codes: against PyTorch, laws, cases by hand."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_conformance.reference import indexer
from mla_conformance.reference.indexer import Prepared, hadamard, layer_norm, rotated, scale_bounds, sylvester
from mla_conformance.reference.projections import Rotation, plain_frequencies
from mla_conformance.tests.proof.yarn import Yarn


def test_the_transform_is_its_own_inverse_and_scales_are_of_either_class(normal: Any) -> None:
    x = Prepared.of(normal(0, 2, 3, 128))
    assert torch.allclose(hadamard(hadamard(x)).values, x.values, rtol=0, atol=1e-13)
    spike = hadamard(Prepared.of(torch.ones(1, 128))).values
    assert spike[0, 0] == pytest.approx(128**0.5) and spike[0, 1:].abs().max() < 1e-12
    signs = sylvester(4, torch.device("cpu")).mul(2).tolist()
    assert signs == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    with pytest.raises(ValueError, match="expected a power of two, got 96"):
        sylvester(96, torch.device("cpu"))
    largest, error = torch.tensor([448.0, 449.0, 0.0, 1e-7], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    low, high = scale_bounds(largest, error, powers_of_two=True)
    assert low.tolist() == [1.0, 2.0, 0.0, 2**-32] and high.tolist() == [2.0, 2.0, 2**-22, 2**-22]
    low, high = scale_bounds(largest, error, powers_of_two=False)
    assert (low <= largest / 448).all() and high[:2].tolist() == pytest.approx([1.0, 449 / 448], rel=1e-6)
    near = torch.tensor([0.25 * (1 + 2**-22), 0.26], dtype=torch.float64)
    assert indexer.nearest_power(near).tolist() == [0.25, 0.26]


def chain(x: torch.Tensor, turns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Prepared:
    return hadamard(rotated(layer_norm(Prepared.of(x), weight, bias, 1e-6), turns, 0, interleaved=False))


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_steps_in_float32_stay_within_the_error_and_near_enough_to_need_it(shift: float, normal: Any) -> None:
    """Rounded behind each step to bf16 they need what is allowed of stored intermediates, and no less."""
    x, weight, bias = normal(0, 64, 1, 128).float() + shift, normal(0, 128), normal(0, 2, 128)[1]
    angle = normal(0, 64, 32)
    turns = torch.cat((angle.cos(), angle.sin()), dim=1)
    golden = chain(x, turns, weight, bias)
    matrix = sylvester(128, x.device).float()

    def computed(dtype: torch.dtype) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x, (128,), weight.float(), bias.float(), 1e-6).to(dtype).float()
        cos, sin = angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)
        a, b = y[..., :32], y[..., 32:64]
        y = torch.cat((a * cos - b * sin, b * cos + a * sin, y[..., 64:]), dim=-1).to(dtype).float()
        return (y @ matrix).to(dtype).double()

    single, half = ((computed(dtype) - golden.values).abs() for dtype in (torch.float32, torch.bfloat16))
    assert (single <= golden.error(32, 0.0)).all()
    assert (half <= golden.error(32, 2**-8)).all()
    beyond = (half > golden.error(32, 0.0)).double().mean()
    assert beyond > 0 if shift else beyond > 0.5  # far from 0 a variance from the mean square is allowed to be off


def rope(x: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    return rotated(Prepared.of(x), rotation.table(positions), 0, rotation.interleaved).values


V3 = Yarn(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)


def test_interleaved_is_complex_multiplication_and_halves_are_its_permutation(normal: Any) -> None:
    x, positions = normal(1, 5, 3, 8), torch.tensor([0, 1, 7, 1000, 163839])
    frequency = 500.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequency)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn[:, None]).flatten(-2)
    turned = rope(x, positions, Rotation.plain(8, base=500.0, interleaved=True))
    torch.testing.assert_close(turned, expected, rtol=1e-9, atol=1e-9)
    x, positions = normal(2, 5, 8), torch.arange(5) * 3
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    halves = rope(x[:, order], positions, Rotation.plain(8, interleaved=False))
    pairs = rope(x, positions, Rotation.plain(8, interleaved=True))
    torch.testing.assert_close(halves, pairs[:, order], rtol=0, atol=1e-15)


def test_fast_pairs_stay_slow_ones_are_slowed_down_and_the_temperature() -> None:
    rotation, plain = V3.rotation(64, interleaved=True), plain_frequencies(64, 1e4)
    shares = [frequency / before for frequency, before in zip(rotation.frequencies, plain, strict=True)]
    assert rotation.dim == 64 and rotation.interleaved and rotation.magnitude == 1.0
    # Pair 10 turns 37 times over 4096 tokens and pair 23 less than once, so the ramp runs between these.
    assert shares[:11] == [1.0] * 11 and shares[23:] == pytest.approx([1 / 40] * 9)
    steps = {round(a - b, 12) for a, b in pairwise(shares[10:24])}
    assert steps == {round((1 - 1 / 40) / 13, 12)}
    # A model with one factor for rotated parts only, with DeepSeek's, and with an extension by 1.
    temperature = 0.1 * math.log(40) + 1
    assert V3.softmax_factor == pytest.approx(temperature**2) and V3.magnitude == 1.0
    paper = Yarn(factor=40.0, original_positions=4096)
    assert paper.magnitude == pytest.approx(temperature) and paper.softmax_factor == 1.0
    halved = Yarn(factor=40.0, original_positions=4096, mscale=0.5, mscale_all_dim=1.0)
    assert halved.magnitude == pytest.approx((0.05 * math.log(40) + 1) / temperature)
    step = Yarn(factor=4.0, original_positions=1)  # a ramp without width: all turns less than once over one token
    plain = plain_frequencies(8, 1e4)
    slowed = step.rotation(8, interleaved=True).frequencies
    assert slowed == pytest.approx([plain[0], *(f / 4 for f in plain[1:])])
    none = Yarn(factor=1.0, original_positions=4096)
    assert none.magnitude == 1.0 and none.rotation(8, interleaved=True).frequencies == pytest.approx(plain)
