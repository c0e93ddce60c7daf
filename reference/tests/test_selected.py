"""Sparse attention and index scores: the laws that their definitions give, and what lists, sinks and windows may be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_conformance.reference.attention as definition
from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.error_budget import Roundoffs
from mla_conformance.reference.indexer import index_scores, window_scores
from mla_conformance.reference.selected import over_lists, selected_attention, with_sink

Normal = Callable[..., Tensor]
T, N, S, D, V = 7, 3, 20, 6, 4


@pytest.fixture
def qkv(normal: Normal) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, T, N, D), normal(2, S, 1, D), normal(3, S, 1, V)


def lists(columns: int) -> Tensor:
    """[T, columns] of different keys, some of them none, row 2 empty."""
    generator = torch.Generator().manual_seed(5)
    found = torch.stack([torch.randperm(S, generator=generator)[:columns] for _ in range(T)])
    found[torch.rand(found.shape, generator=generator) < 0.3] = -1
    found[2] = -1
    return found


def assert_same(a: AttentionState, b: AttentionState) -> None:
    torch.testing.assert_close(a.output, b.output, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-13, atol=1e-13)
    assert (a.terms is None) == (b.terms is None)
    if a.terms is not None and b.terms is not None:
        for name, term in a.terms.by_name().items():
            torch.testing.assert_close(b.terms.by_name()[name], term, rtol=1e-12, atol=1e-12)


def selected(qkv: tuple[Tensor, Tensor, Tensor], chosen: Tensor, **options: Any) -> AttentionState:
    q, k, v = qkv
    return selected_attention(q, k, v, chosen, scale=0.4, **options)


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionState:
    starts = (0, len(q)), (0, len(k))
    return attention(q, k, v, query_start_loc=starts[0], key_start_loc=starts[1], scale=0.4, causal=False, **options)


def test_each_row_is_dense_attention_to_the_keys_of_its_list(qkv: Any, monkeypatch: Any) -> None:
    """With its error terms, and in whatever workspace."""
    q, k, v = qkv
    chosen, terms = lists(9), {"with_terms": True, "with_key_terms": True}
    state = selected(qkv, chosen, **terms)
    monkeypatch.setattr(definition, "WORKSPACE_ELEMENTS", 1)
    assert_same(selected(qkv, chosen, **terms), state)
    for row in range(T):
        keys = chosen[row][chosen[row] >= 0]
        alone = dense(q[row : row + 1], k[keys], v[keys], **terms)
        assert_same(alone, selected(qkv, chosen, **terms, rows=[row]))
        torch.testing.assert_close(state.output[row : row + 1], alone.output, rtol=1e-13, atol=1e-13)
    assert not state.output[2].any() and bool((state.lse[:, 2] == -torch.inf).all())


def test_the_terms_under_a_sink_bound_an_error_of_the_lse_and_a_row_with_nan_has_no_order(qkv: Any) -> None:
    """Shift the LSE by its own term times a small unit: the output moves by no more than the score term allows."""
    state = selected(qkv, lists(9), with_terms=True)
    assert state.terms is not None
    sink, unit = torch.zeros(N, dtype=torch.float64), 1e-6
    shifted = AttentionState(state.output, state.lse + unit * (state.terms.lse_score + state.lse.abs() + 1))
    sunk = with_sink(state, sink)
    assert sunk.terms is not None
    moved = (with_sink(shifted, sink).output - sunk.output).abs()
    assert bool((moved[torch.arange(T) != 2] <= 1.001 * unit * sunk.terms.score[torch.arange(T) != 2]).all())
    found = window_scores(torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, torch.nan]]), torch.tensor([3, 2]))
    assert found.unordered.tolist() == [True, False]
    assert found.fewest(2).tolist() == [0, 2] and found.scores[0].tolist() == [0, 0, 0]


def by_flash_mla(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, length: Tensor, sink: Tensor) -> Any:
    """What the tests of FlashMLA hold its kernels to: everything gathered, what does not count masked, one softmax.

    Of a row without keys its LSE is +inf, which our contract has as -inf.
    """
    counted = (chosen >= 0) & (chosen < len(k)) & (torch.arange(chosen.shape[1]) < length.unsqueeze(1))
    keys, values = (x[torch.where(counted, chosen, 0), 0].double() for x in (k, v))
    scores = torch.einsum("tnd,tkd->tnk", q.double(), keys) * 0.4
    scores = scores.masked_fill(~counted.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    output = torch.einsum("tnk,tkv->tnv", weights, values) / (1 + (sink - lse).exp()).unsqueeze(-1)
    return output.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse.masked_fill(lse == -torch.inf, torch.inf).mT


def test_the_definition_is_that_of_flash_mlas_own_tests(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """A key may be named twice, one that none names is NaN, and sinks are left out of the LSE."""
    chosen, length = lists(12), torch.tensor([12, 0, 12, 3, 7, 12, 1])
    chosen = chosen.masked_fill(chosen == 3, -1)
    chosen[0, 1], qkv[1][3], qkv[2][3] = chosen[0, 0], torch.nan, torch.nan
    chosen[4, 8:], chosen[5, 2] = 2**31 - 1, S  # behind the length, and beyond the keys
    sink = torch.tensor([-torch.inf, 0.3, torch.inf], dtype=torch.float64)
    output, lse = by_flash_mla(*qkv, chosen, length, sink)
    counted = (chosen < S) & (torch.arange(12) < length.unsqueeze(1))
    state = selected(qkv, torch.where(counted, chosen, -1), sink=sink)
    torch.testing.assert_close(state.output, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.lse, lse.masked_fill(lse == torch.inf, -torch.inf), rtol=1e-12, atol=1e-12)
    assert bool((lse[:, 1] == torch.inf).all()) and not output[1].any()


REFUSED = {
    "beyond": (lambda q, k, v: (q, k, v, torch.full((T, 2), S)), "keys 0 to 19, or -1, got 20 to 20"),
    "below": (lambda q, k, v: (q, k, v, torch.full((T, 2), -2)), "keys 0 to 19, or -1, got -2"),
    "floats": (lambda q, k, v: (q, k, v, torch.zeros(T, 2)), "lists of integers, got torch.float32"),
    "rows": (lambda q, k, v: (q, k, v, torch.zeros(T + 1, 2, dtype=torch.int32)), "a list [T, K] for each"),
    "width": (lambda q, k, v: (q[..., 1:], k, v, torch.zeros(T, 2, dtype=torch.int32)), "as wide as the keys"),
    "heads": (lambda q, k, v: (q, k.expand(S, 2, D), v, torch.zeros(T, 2, dtype=torch.int32)), r"k [S, 1 or N, D]"),
}


def test_operands_that_do_not_fit_are_refused(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    for name, (operands, message) in REFUSED.items():
        with pytest.raises(ValueError, match="expected ") as error:
            selected_attention(*operands(*qkv), scale=1.0)
        assert message in str(error.value), name
    with pytest.raises(ValueError, match=r"a sink for each of 3 heads, got shape \(2,\)"):
        selected(qkv, lists(4), sink=torch.zeros(2))
    with pytest.raises(ValueError, match="expected at least one row"):
        selected(qkv, lists(9), rows=[])


def test_rows_over_lists_are_the_definition_or_left_to_it_and_their_terms_a_little_larger(qkv: Any) -> None:
    q, k, v = qkv
    chosen = lists(9)
    k[(chosen[..., None] == torch.arange(S)).any(dim=(0, 1)).logical_not()] = torch.nan  # keys that no list names
    expected = selected(qkv, chosen, with_terms=True)
    state = over_lists(q, k[:, 0], v[:, 0], chosen, 0.4)
    assert state is not None and state.terms is not None and expected.terms is not None
    assert_same(AttentionState(state.output, state.lse), AttentionState(expected.output, expected.lse))
    for name, term in expected.terms.by_name().items():
        found = state.terms.by_name()[name].double()
        assert bool((found >= term).all() and (found <= 1.05 * term).all()), name
    k = k.nan_to_num()
    for beyond in (1e4 * q[3, 1], torch.nan):
        q[3, 1] = beyond
        assert over_lists(q, k[:, 0], v[:, 0], lists(9), 0.4) is None


EXACT = {"p": 0.0, "p_floor": 0.0, "partials": 0.0, "output": 0.0, "output_floor": 0.0, "row_sum": 0.0, "exp": 0.0}


def batch(lengths: list[tuple[int, int]], seed: int = 0) -> dict:
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


def test_rows_can_be_chosen_and_a_request_without_keys_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batch([(3, 5), (2, 0), (4, 9)])
    whole = index_scores(**made)
    monkeypatch.setattr("mla_conformance.reference.attention.WORKSPACE_ELEMENTS", 1)
    some = index_scores(**made, rows=[1, 4, 8])
    width = some.scores.shape[1]
    torch.testing.assert_close(some.scores, whole.scores[[1, 4, 8], :width], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(some.magnitude, whole.magnitude[[1, 4, 8], :width], rtol=1e-13, atol=1e-13)
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
