"""What roundings do: of keys, projections and alike weights; terms against written sums and real roundings."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.error_budget import (
    P_ROUNDOFFS,
    Roundoffs,
    Visible,
    element_budget,
    expected_row_rms,
    lse_budget,
    most_of_a_sum,
    running_sums,
    shared_roundings,
)
from mla_conformance.reference.projections import expand_key, projected_terms, up_project

SCALE = 0.3
ROUNDOFF = 2.0**-10
NOTHING_ELSE = dict.fromkeys(("p", "p_floor", "partials", "output", "output_floor", "row_sum", "exp"), 0.0)
NOTHING_ELSE["accumulation"] = 0.0
KEYS_ONLY = Roundoffs(**NOTHING_ELSE, keys=ROUNDOFF)


def latent_attention(q: Tensor, keys: Tensor, **terms: Any) -> AttentionState:
    """One request whose value is the first 24 of 32 elements of its shared keys."""
    locations: dict[str, Any] = {"query_start_loc": (0, len(q)), "key_start_loc": (0, len(keys))}
    keys = keys.unsqueeze(1)
    return attention(q, keys, keys[..., :24], **locations, scale=SCALE, causal=True, **terms)


@pytest.fixture(scope="module")
def operands(normal: Any) -> tuple[Tensor, Tensor]:
    return normal(1, 3, 2, 32), normal(2, 40, 32)


def test_terms_of_keys_are_there_if_asked_for_and_of_those_that_are_seen(operands: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="with_key_terms=True"):
        expected_row_rms(latent_attention(*operands, with_terms=True), KEYS_ONLY)
    q, keys = operands
    hidden = keys.clone()
    hidden[-1] = torch.nan
    whole, cut = (latent_attention(q, k, with_key_terms=True).terms for k in (keys, hidden))
    assert whole is not None and cut is not None
    for name in ("key_spread", "key_shared", "key_shift"):
        assert torch.allclose(whole.by_name()[name][:2], cut.by_name()[name][:2], rtol=1e-9)


def independent(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def one_for_each_element(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return independent(torch.Size((1, shape[1])), generator).expand(shape)


def one_for_all(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return independent(torch.Size((1, 1)), generator).expand(shape)


@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "keys of one shape"])
@pytest.mark.parametrize("rounding", [independent, one_for_each_element, one_for_all])
def test_roundings_stay_within_the_budget(operands: tuple[Tensor, Tensor], rounding: Any, alike: bool) -> None:
    q, keys = operands
    if alike:
        keys = keys[:1] * keys[:, :1].sign() + 0.01 * keys
    state = latent_attention(q, keys, with_key_terms=True)
    budget, rms, lse = (rule(state, KEYS_ONLY) for rule in (element_budget, expected_row_rms, lse_budget))
    squares = []
    for seed in range(25):
        noise = ROUNDOFF * rounding(keys.shape, torch.Generator().manual_seed(seed))
        rounded = latent_attention(q, keys * (1 + noise))
        error = (rounded.output - state.output).abs()
        assert bool((error <= budget * 1.01).all()) and bool(((rounded.lse - state.lse).abs() <= lse * 1.01).all())
        squares.append((error.square().mean(-1).sqrt() / rms).square())
    worst = torch.stack(squares).mean(0).sqrt().max()
    assert 0.02 < worst < 2.0


NOPE, ROPE, VALUE, LATENT, HEADS = 16, 8, 24, 64, 3
UNIT = 2.0**-8


class Layer:
    """Operands of one request of 4 queries and 30 keys, and dense weights."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q, self.kv_c, self.k_pe = draw(4, HEADS, NOPE + ROPE), draw(30, LATENT), draw(30, ROPE)
        self.weight = draw(LATENT, HEADS, NOPE + VALUE) / LATENT**0.5
        self.k_nope, self.v = up_project(self.kv_c, self.weight).tensor_split([NOPE], dim=-1)
        self.k = expand_key(self.k_nope, self.k_pe)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.state(q, k, v).output

    def state(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
        starts = {"query_start_loc": (0, 4), "key_start_loc": (0, 30)}
        return attention(q, k, v, **starts, scale=0.3, causal=True, with_terms=True, with_key_terms=True)

    def golden(self) -> AttentionState:
        state, projection = self.state(self.q, self.k, self.v), (self.kv_c, self.weight)
        starts = {"query_start_loc": (0, 4), "key_start_loc": (0, 30)}
        projected = projected_terms(self.q, self.k, self.v, projection, **starts, scale=0.3)
        return AttentionState(state.output, state.lse, state.terms, projected)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def multiplied_out(layer: Layer) -> Tensor:
    return layer.attend(layer.q, expand_key(rounded(layer.k_nope), layer.k_pe), rounded(layer.v))


def absorbed(layer: Layer) -> Tensor:
    q_nope, q_pe = layer.q.tensor_split([NOPE], dim=-1)
    ql = rounded(torch.einsum("tnp,lnp->tnl", q_nope, layer.weight[..., :NOPE]))
    keys = torch.cat([layer.kv_c, layer.k_pe], dim=-1).unsqueeze(1)
    attended = layer.attend(torch.cat([ql, q_pe], dim=-1), keys, layer.kv_c.unsqueeze(1))
    return torch.einsum("tnl,lnv->tnv", rounded(attended), layer.weight[..., NOPE:])


def of_rounded_latents(layer: Layer) -> Tensor:
    k_nope, v = up_project(rounded(layer.kv_c), layer.weight).tensor_split([NOPE], dim=-1)
    return layer.attend(layer.q, expand_key(k_nope, rounded(layer.k_pe)), v)


@pytest.mark.parametrize(
    ("route", "roundoffs"),
    [(multiplied_out, {"projections": UNIT}), (absorbed, {"projections": UNIT}), (of_rounded_latents, {"keys": UNIT})],
)
def test_a_faithful_route_has_the_size_of_its_budget(route: Any, roundoffs: Any) -> None:
    layer = Layer()
    golden, allowed = layer.golden(), Roundoffs(**NOTHING_ELSE, **roundoffs)
    error = (route(layer) - golden.output).abs()
    assert bool((error <= element_budget(golden, allowed)).all())
    ratio = error.square().mean(-1).sqrt() / expected_row_rms(golden, allowed)
    assert 0.2 < float(ratio.mean()) < 1.2


def test_rows_without_keys_have_no_terms() -> None:
    layer = Layer()
    projection, starts = (layer.kv_c[:2], layer.weight), {"query_start_loc": (0, 4), "key_start_loc": (0, 2)}
    few = projected_terms(layer.q, layer.k[:2], layer.v[:2], projection, **starts, scale=0.3)
    assert all(not part[:2].any() and part[2:].any() for part in vars(few).values())


BF16 = P_ROUNDOFFS.index(2.0**-8)
P_ONLY = Roundoffs(**NOTHING_ELSE | {"p": 2.0**-8})


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return shared_roundings(q, k, v, [slice(0, len(k))] * len(q), [len(q) - 1], SCALE)


def two_directions(keys: int, noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys that are nearly one vector or its opposite, values too; logits of each head are two, not far apart."""
    draw = torch.Generator().manual_seed(3)
    one = torch.randn(1, 1, 24, generator=draw, dtype=torch.float64) * 0.004
    sign = torch.where(torch.arange(keys) % 2 == 0, 1.0, -1.0).double().view(-1, 1, 1)
    k = one * sign + noise * torch.randn(keys, 1, 24, generator=draw, dtype=torch.float64)
    return torch.randn(3, 4, 24, generator=draw, dtype=torch.float64), k, k[..., :16]


def test_ordinary_rows_share_nothing_and_equal_keys_the_square_of_their_sum_by_a_list_too(normal: Any) -> None:
    k = normal(1, 700, 1, 24)
    assert not shared(normal(2, 3, 4, 24), k, k[..., :16]).any()
    assert not shared(normal(2, 3, 4, 24), k[:0], k[:0, :, :16]).any()
    q, k, v = two_directions(600)
    found = shared(q, k, v)
    p = (SCALE * (q @ k[:, 0].mT)).softmax(-1)
    groups = torch.stack([(p[..., half::2] @ v[half::2, 0]).square().mean(-1) for half in (0, 1)]).sum(0)
    assert bool((found <= groups.unsqueeze(-1)).all()) and bool((found[..., BF16] >= 0.7 * groups).all())
    by_list = shared_roundings(q, k, v, [torch.arange(600).flip(0)] * 3, [2], SCALE)
    assert torch.allclose(by_list, found, rtol=1e-6, atol=0.0)


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
