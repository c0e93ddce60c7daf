"""What weights that are rounded alike share: nothing of ordinary data, and of equal keys all of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.error_budget import Roundoffs, expected_row_rms
from mla_conformance.reference.shared_roundings import (
    P_ROUNDOFFS,
    Visible,
    most_of_a_sum,
    running_sums,
    shared_roundings,
)

SCALE = 0.3
BF16 = P_ROUNDOFFS.index(2.0**-8)
P_ONLY = Roundoffs(
    p=2.0**-8, p_floor=0.0, partials=0.0, output=0.0, output_floor=0.0, row_sum=0.0, exp=0.0, accumulation=0.0
)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of all rows of one request without a mask."""
    return shared_roundings(q, k, v, [slice(0, len(k))] * len(q), [len(q) - 1], SCALE)


def two_directions(keys: int, noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that are nearly one vector or its opposite, values too; logits of each head are two, not far apart."""
    draw = torch.Generator().manual_seed(3)
    one = torch.randn(1, 1, 24, generator=draw, dtype=torch.float64) * 0.004
    sign = torch.where(torch.arange(keys) % 2 == 0, 1.0, -1.0).double().view(-1, 1, 1)
    k = one * sign + noise * torch.randn(keys, 1, 24, generator=draw, dtype=torch.float64)
    return torch.randn(3, 4, 24, generator=draw, dtype=torch.float64), k, k[..., :16]


def test_ordinary_rows_share_nothing(normal: Any) -> None:
    k = normal(1, 700, 1, 24)
    assert not shared(normal(2, 3, 4, 24), k, k[..., :16]).any()
    assert not shared(normal(2, 3, 4, 24), k[:0], k[:0, :, :16]).any()


def test_equal_keys_share_the_square_of_their_sum() -> None:
    q, k, v = two_directions(600)
    found = shared(q, k, v)
    p = (SCALE * (q @ k[:, 0].mT)).softmax(-1)
    groups = torch.stack([(p[..., half::2] @ v[half::2, 0]).square().mean(-1) for half in (0, 1)]).sum(0)
    assert bool((found <= groups.unsqueeze(-1)).all()) and bool((found[..., BF16] >= 0.7 * groups).all())


def test_a_row_that_sees_its_keys_by_a_list_shares_the_same() -> None:
    q, k, v = two_directions(600)
    by_list = shared_roundings(q, k, v, [torch.arange(600).flip(0)] * 3, [2], SCALE)
    assert torch.allclose(by_list, shared(q, k, v), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-4, 1e-3])
def test_roundings_of_close_weights_stay_within_the_row_rule_and_have_its_size(noise: float) -> None:
    q, k, v = two_directions(600, noise)
    starts: dict[str, Any] = {"query_start_loc": (0, 3), "key_start_loc": (0, 600)}
    plain = attention(q, k, v, **starts, scale=SCALE, causal=False, with_terms=True)
    golden = AttentionState(plain.output, plain.lse, plain.terms, shared=shared(q, k, v))
    scores = SCALE * (q @ k[:, 0].mT)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    error = (p.bfloat16().double() - p) @ v[:, 0] / p.sum(-1, keepdim=True)
    ratio = error.square().mean(-1).sqrt() / expected_row_rms(golden, P_ONLY)
    assert bool((ratio < 1.3).all()) and float(ratio.max()) > 0.2


def test_a_running_sum_of_equal_weights_is_off_by_the_most_and_that_of_others_by_little(normal: Any) -> None:
    q, k = normal(1, 3, 4, 24), normal(2, 4096, 1, 24)
    alike = torch.cat([k[:1].expand(4096, -1, -1), k])
    visible: Visible = [slice(0, 4096), slice(4096, 8192), torch.arange(6000)]
    wanted = torch.tensor([[True, True, True], [True, False, True], [False, False, False], [True, True, True]])
    found = running_sums(q, alike, visible, wanted, SCALE, deviations=6.0)
    assert bool((found[~wanted] == 0).all())
    assert torch.allclose(found[wanted[:, 0], 0], torch.full((3,), most_of_a_sum(4096)).double())
    assert bool((found[[0, 3], 1] < most_of_a_sum(4096) / 5).all())
    row_alone = running_sums(q[2:], alike, visible[2:], wanted[:, 2:], SCALE, deviations=6.0)
    assert torch.equal(found[:, 2:], row_alone)
