"""Laws that attention and merging obey for every batch."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, ErrorTerms, attention, merge_states

Normal = Callable[..., Tensor]
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**16)


def one_request(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> AttentionState:
    return attention(
        q,
        k,
        v,
        query_start_loc=(0, len(q)),
        key_start_loc=(0, len(k)),
        scale=0.7,
        causal=causal,
        with_terms=True,
    )


def parts(state: AttentionState) -> list[Tensor]:
    """Every tensor of a state, tokens first."""
    terms: ErrorTerms | None = state.terms
    assert terms is not None
    return [
        state.output,
        terms.magnitude,
        terms.score,
        terms.squares,
        terms.peak,
        state.lse.mT,
        terms.lse_score.mT,
    ]


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@quick
@given(seed=seeds, q_len=st.integers(1, 6), context=st.integers(0, 6), data=st.data())
def test_causal_prefix_does_not_know_the_future(
    normal: Normal, seed: int, q_len: int, context: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, q_len))
    q, k, v = (
        normal(seed, q_len, 2, 3),
        normal(seed + 1, context + q_len, 2, 3),
        normal(seed + 2, context + q_len, 2, 4),
    )
    whole = one_request(q, k, v, causal=True)
    prefix = one_request(q[:kept], k[: context + kept], v[: context + kept], causal=True)
    assert_same([part[:kept] for part in parts(whole)], parts(prefix))


@quick
@given(seed=seeds, q_len=st.integers(1, 5), kv_len=st.integers(0, 9), data=st.data())
def test_merging_any_split_of_the_keys(normal: Normal, seed: int, q_len: int, kv_len: int, data: st.DataObject) -> None:
    first = torch.tensor(data.draw(st.lists(st.booleans(), min_size=kv_len, max_size=kv_len)), dtype=torch.bool)
    q, k, v = normal(seed, q_len, 2, 3), normal(seed + 1, kv_len, 2, 3), normal(seed + 2, kv_len, 2, 4)
    a, b = (one_request(q, k[keys], v[keys], causal=False) for keys in (first, ~first))
    whole = one_request(q, k, v, causal=False)
    for merged in (merge_states(a, b), merge_states(b, a)):
        assert_same([merged.output, merged.lse], [whole.output, whole.lse])


@quick
@given(seed=seeds, permutation=st.permutations(range(7)))
def test_unmasked_attention_ignores_the_order_of_keys(normal: Normal, seed: int, permutation: list[int]) -> None:
    q, k, v = normal(seed, 3, 2, 3), normal(seed + 1, 7, 2, 3), normal(seed + 2, 7, 2, 4)
    shuffled = one_request(q, k[permutation], v[permutation], causal=False)
    assert_same(parts(shuffled), parts(one_request(q, k, v, causal=False)))


@quick
@given(seed=seeds, permutation=st.permutations(range(4)), causal=st.booleans())
def test_heads_do_not_know_each_other(normal: Normal, seed: int, permutation: list[int], causal: bool) -> None:
    q, k, v = normal(seed, 3, 4, 3), normal(seed + 1, 5, 4, 3), normal(seed + 2, 5, 4, 2)
    shuffled = one_request(q[:, permutation], k[:, permutation], v[:, permutation], causal=causal)
    assert_same(parts(shuffled), [part[:, permutation] for part in parts(one_request(q, k, v, causal=causal))])


@quick
@given(lens=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4), seed=seeds)
def test_requests_do_not_know_each_other(normal: Normal, lens: list[tuple[int, int]], seed: int) -> None:
    q_lens, k_lens = zip(*lens, strict=True)
    q, k, v = normal(seed, sum(q_lens), 2, 3), normal(seed + 1, sum(k_lens), 2, 3), normal(seed + 2, sum(k_lens), 2, 4)
    query_start_loc = [sum(q_lens[:b]) for b in range(len(lens) + 1)]
    key_start_loc = [sum(k_lens[:b]) for b in range(len(lens) + 1)]
    state = attention(
        q, k, v, query_start_loc=query_start_loc, key_start_loc=key_start_loc, scale=0.7, causal=True, with_terms=True
    )
    alone = [
        parts(one_request(*operands, causal=True))
        for operands in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True)
    ]
    assert_same(parts(state), [torch.cat(part) for part in zip(*alone, strict=True)])


@quick
@given(seed=seeds, q_len=st.integers(1, 6), kv_len=st.integers(0, 6))
def test_rows_without_a_visible_key(normal: Normal, seed: int, q_len: int, kv_len: int) -> None:
    state = one_request(
        normal(seed, q_len, 2, 3), normal(seed + 1, kv_len, 2, 3), normal(seed + 2, kv_len, 2, 4), causal=True
    )
    empty = max(0, q_len - kv_len)
    assert (state.output[:empty] == 0).all() and (state.lse[:, :empty] == -torch.inf).all()
    assert state.lse[:, empty:].isfinite().all()
    assert not any(part.isnan().any() for part in parts(state))
