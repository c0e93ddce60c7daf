"""The terms for keys that a kernel rounds once more: their sums written out, and what roundings really do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.error_budget import Roundoffs, element_budget, expected_row_rms, lse_budget

SCALE = 0.3
ROUNDOFF = 2.0**-10
NOTHING_ELSE: dict[str, float] = {
    name: 0.0 for name in ("p", "p_floor", "partials", "output", "output_floor", "row_sum", "exp", "accumulation")
}
KEYS_ONLY = Roundoffs(**NOTHING_ELSE, keys=ROUNDOFF)


def latent_attention(q: Tensor, keys: Tensor, **terms: Any) -> AttentionState:
    """One request whose value is the first 24 of 32 elements of its shared keys."""
    locations: dict[str, Any] = {"query_start_loc": (0, len(q)), "key_start_loc": (0, len(keys))}
    keys = keys.unsqueeze(1)
    return attention(q, keys, keys[..., :24], **locations, scale=SCALE, causal=True, **terms)


@pytest.fixture(scope="module")
def operands(normal: Any) -> tuple[Tensor, Tensor]:
    return normal(1, 3, 2, 32), normal(2, 40, 32)


def test_the_terms_are_their_sums(operands: tuple[Tensor, Tensor]) -> None:
    q, keys = operands
    with pytest.raises(ValueError, match="with_key_terms=True"):
        expected_row_rms(latent_attention(q, keys, with_terms=True), KEYS_ONLY)
    state = latent_attention(q, keys, with_key_terms=True)
    assert state.terms is not None and state.terms.key_spread is not None
    assert state.terms.key_shared is not None and state.terms.key_shift is not None
    token, head, seen = 1, 1, 39
    row, k = q[token, head], keys[:seen]
    scores = SCALE * k @ row
    p, deviation = scores.softmax(0), k[:, :24] - state.output[token, head]
    products = (SCALE * row * k).square().sum(1)
    spread = (p.square() * products) @ deviation.square()
    shift = ((p * scores) @ deviation).abs() + state.output[token, head].abs()
    shared = ((SCALE * row).unsqueeze(1) * (k.mT * p) @ deviation).square().sum(0).mean()
    assert torch.allclose(state.terms.key_spread[token, head], spread, rtol=1e-9)
    assert torch.allclose(state.terms.key_shift[token, head], shift, rtol=1e-9)
    estimate = float(state.terms.key_shared[token, head] / shared)  # from four combinations of the columns
    assert estimate == pytest.approx(1.0, abs=0.6)


def test_keys_that_are_not_seen_have_no_part_in_the_terms(operands: tuple[Tensor, Tensor]) -> None:
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
