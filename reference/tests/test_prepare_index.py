"""Index queries and keys before they are codes: against PyTorch, cases by hand, and steps that round."""

import pytest
import torch

from mla_conformance.reference.prepare_index import (
    Prepared,
    hadamard,
    is_power,
    layer_norm,
    nearest_power,
    rotated,
    scale_bounds,
    sylvester,
)
from mla_conformance.reference.rope import Rotation, rope


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_norm_is_pytorchs() -> None:
    x, weight, bias = drawn(5, 1, 128), drawn(128), drawn(2, 128)[1]
    expected = torch.nn.functional.layer_norm(x, (128,), weight, bias, 1e-5)
    assert torch.allclose(layer_norm(Prepared.of(x), weight, bias, 1e-5).values, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("first", [0, 40])
def test_the_rotation_is_that_of_rope_and_leaves_other_columns(interleaved: bool, first: int) -> None:
    x, positions = drawn(4, 3, 64), torch.tensor([0, 5, 9, 1000])
    rotation = Rotation.plain(24, interleaved=interleaved)
    angle = positions[:, None] * torch.tensor(rotation.frequencies, dtype=torch.float64)
    turned = rotated(Prepared.of(x), torch.cat((angle.cos(), angle.sin()), dim=1), first, interleaved).values
    expected = x.clone()
    expected[..., first : first + 24] = rope(x[..., first : first + 24], positions, rotation)
    assert torch.allclose(turned, expected, rtol=0, atol=1e-13)


def test_the_transform_is_its_own_inverse_and_puts_a_constant_into_one_column() -> None:
    x = Prepared.of(drawn(2, 3, 128))
    assert torch.allclose(hadamard(hadamard(x)).values, x.values, rtol=0, atol=1e-13)
    spike = hadamard(Prepared.of(torch.ones(1, 128))).values
    assert spike[0, 0] == pytest.approx(128**0.5) and spike[0, 1:].abs().max() < 1e-12
    signs = sylvester(4, torch.device("cpu")).mul(2).tolist()
    assert signs == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    with pytest.raises(ValueError, match="expected a power of two, got 96"):
        sylvester(96, torch.device("cpu"))


def chain(x: torch.Tensor, turns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Prepared:
    return hadamard(rotated(layer_norm(Prepared.of(x), weight, bias, 1e-6), turns, 0, interleaved=False))


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_steps_in_float32_stay_within_the_error_and_near_enough_to_need_it(shift: float) -> None:
    """Rounded behind each step to bf16 they need what is allowed of stored intermediates, and no less."""
    x, weight, bias, angle = drawn(64, 1, 128).float() + shift, drawn(128), drawn(2, 128)[1], drawn(64, 32)
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


def test_scales_of_either_class() -> None:
    largest, error = torch.tensor([448.0, 449.0, 0.0, 1e-7], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    low, high = scale_bounds(largest, error, powers_of_two=True)
    assert low.tolist() == [1.0, 2.0, 0.0, 2**-32] and high.tolist() == [2.0, 2.0, 2**-22, 2**-22]
    low, high = scale_bounds(largest, error, powers_of_two=False)
    assert (low <= largest / 448).all() and high[:2].tolist() == pytest.approx([1.0, 449 / 448], rel=1e-6)
    near = torch.tensor([0.25 * (1 + 2**-22), 0.26], dtype=torch.float64)
    assert nearest_power(near).tolist() == [0.25, 0.26] and is_power(nearest_power(near)).tolist() == [True, False]
