"""`attention` and merging: against arbitrary precision, what they refuse, and what merging rounds."""

from collections.abc import Callable
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention, merge
from mla_conformance.reference.error_budget import merged_chunks, merged_parts, merged_states

Normal = Callable[..., Tensor]
BATCH: dict[str, Any] = {"query_start_loc": (0, 4, 4, 9), "key_start_loc": (0, 7, 9, 12), "scale": 0.4}
TERMS = ("magnitude", "score", "squares", "peak")
INF = float("inf")
mpmath.mp.dps = 40


def assert_same(a: AttentionState, b: AttentionState, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(a.output, b.output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, rtol=tolerance, atol=tolerance)


def exact_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, list[mpf]]:
    rows = [([mpf(x) for x in key], [mpf(x) for x in value]) for key, value in zip(k.tolist(), v.tolist(), strict=True)]
    if not rows:
        return {**dict.fromkeys(("output", *TERMS), [mpf(0)] * v.shape[1]), "lse": [-mpmath.inf], "lse_score": [mpf(0)]}
    query = [mpf(x) for x in q.tolist()]
    logits = [scale * mpmath.fdot(query, key) for key, _ in rows]
    sizes = [abs(scale) * mpmath.fdot([abs(x) for x in query], [abs(x) for x in key]) for key, _ in rows]
    lse = mpmath.log(mpmath.fsum(mpmath.exp(logit) for logit in logits))
    p = [mpmath.exp(logit - lse) for logit in logits]

    def columns(term: Callable[[int, mpf], mpf]) -> list[mpf]:
        return [mpmath.fsum(term(s, value[c]) for s, (_, value) in enumerate(rows)) for c in range(v.shape[1])]

    return {
        "output": columns(lambda s, x: p[s] * x),
        "magnitude": columns(lambda s, x: p[s] * abs(x)),
        "score": columns(lambda s, x: p[s] * sizes[s] * abs(x)),
        "squares": columns(lambda s, x: p[s] ** 2 * x**2),
        "peak": columns(lambda _, x: max(p) * abs(x)),
        "lse": [lse],
        "lse_score": [mpmath.fdot(p, sizes)],
    }


@settings(max_examples=25, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=3),
    scale=st.sampled_from((0.31, -0.5, 0.0, 200.0)),
    causal=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_row_is_the_definition_in_arbitrary_precision(
    normal: Normal, lens: list[tuple[int, int]], scale: float, causal: bool, shared: bool, seed: int
) -> None:
    queries, keys = ([0, *accumulate(each)] for each in zip(*lens, strict=True))
    heads = 1 if shared else 2
    q, k = normal(seed, queries[-1], 2, 4), normal(seed + 1, keys[-1], heads, 4)
    v, tolerance = normal(seed + 2, keys[-1], heads, 3), 1e-11 if scale == 200.0 else 1e-14
    starts: dict[str, Any] = {"query_start_loc": queries, "key_start_loc": keys}
    state = attention(q, k, v, **starts, scale=scale, causal=causal, with_terms=True)
    assert state.terms is not None
    tnv = {"output": state.output} | {name: getattr(state.terms, name) for name in TERMS}
    nt = {"lse": state.lse, "lse_score": state.terms.lse_score}
    for request in range(len(lens)):
        for t in range(queries[request], queries[request + 1]):
            end = keys[request + 1]
            seen = slice(keys[request], max(keys[request], end - queries[request + 1] + t + 1) if causal else end)
            for n in range(2):
                exact = exact_row(q[t, n], k[seen, n % heads], v[seen, n % heads], scale)
                golden = {x: y[t, n] for x, y in tnv.items()} | {x: y[n, t : t + 1] for x, y in nt.items()}
                for name, numbers in exact.items():
                    want = torch.tensor([float(x) for x in numbers], dtype=torch.float64)
                    torch.testing.assert_close(golden[name], want, rtol=tolerance, atol=tolerance, msg=f"{name} {t}")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), q_len=st.integers(1, 5), first=st.lists(st.booleans(), max_size=9))
def test_merging_any_split_of_the_keys(normal: Normal, seed: int, q_len: int, first: list[bool]) -> None:
    q, k, v = normal(seed, q_len, 2, 3), normal(seed + 1, len(first), 2, 3), normal(seed + 2, len(first), 2, 4)
    chosen = torch.tensor(first, dtype=torch.bool)

    def of(keys: Tensor) -> AttentionState:
        starts: dict[str, Any] = {"query_start_loc": (0, q_len), "key_start_loc": (0, int(keys.sum()))}
        return attention(q, k[keys], v[keys], **starts, scale=0.7, causal=False)

    a, b, whole = of(chosen), of(~chosen), of(torch.ones_like(chosen))
    for one, other in ((a, b), (b, a)):
        assert_same(AttentionState(*merge(one.output, one.lse, other.output, other.lse)), whole, 1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), INF, -INF, 1e30])
def test_a_merge_ignores_an_empty_part_whatever_it_holds_hides_no_nan_and_is_exact(garbage: float) -> None:
    empty, full = torch.full((2, 3, 4), garbage), torch.ones(2, 3, 4)
    none, some = torch.full((3, 2), -INF), torch.full((3, 2), 0.5)
    for output, lse in (merge(empty, none, full, some), merge(full, some, empty, none)):
        assert (output == 1).all() and (lse == 0.5).all()
    output, lse = merge(empty, none, empty, none)
    assert (output == 0).all() and (lse == -INF).all()
    one, lse = torch.ones(1, 1, 1), torch.full((1, 1), 1e5)
    assert merge(one * torch.nan, lse, one, lse)[0].isnan().all()
    output, merged = merge(one, lse, 3 * one, lse)
    assert output.dtype == merged.dtype == torch.float64
    assert output.item() == pytest.approx(2.0, rel=1e-10)
    assert merged.item() == pytest.approx(1e5 + 0.6931471805599453, rel=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start_loc": (0, 9)}, "B \\+ 1 entries each"),
        ({"query_start_loc": (0,), "key_start_loc": (0,)}, "B >= 1"),
        ({"query_start_loc": (1, 4, 4, 9)}, "query_start_loc must start at 0"),
        ({"query_start_loc": (0, 4, 3, 9)}, "query_start_loc .* never descend"),
        ({"key_start_loc": (0, 7, 9, 13)}, "key_start_loc .* 12 rows"),
        ({"q": (9, 4)}, "three dimensions"),
        ({"q": (9, 4, 5)}, "one width"),
        ({"v": (11, 4, 5)}, "one number of tokens"),
        ({"k": (12, 2, 6)}, "4 heads"),
    ],
)
def test_shapes_and_start_locations_are_checked(change: dict[str, Any], message: str) -> None:
    shapes = {"q": (9, 4, 6), "k": (12, 4, 6), "v": (12, 4, 5)}
    operands: dict[str, Any] = {name: torch.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        attention(**operands, **{name: change.get(name, value) for name, value in BATCH.items()}, causal=True)


ROUNDOFF = 2.0**-8
Joined = Callable[[Tensor, Tensor], Tensor]


def rounded(x: Tensor) -> Tensor:
    """In the steps of bf16, relative to the size of each number, as an output is stored that others outweigh later."""
    return x.bfloat16().double()


def in_a_tree(parts: list[Tensor], join: Joined) -> Tensor:
    while len(parts) > 1:
        parts = [reduce(join, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0]


@pytest.mark.parametrize("chunks", [1, 2, 3, 16, 128])
@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_every_order_of_merges_stays_within_the_terms(chunks: int, mean: float) -> None:
    drawing = torch.Generator().manual_seed(chunks)
    parts = list((torch.randn(chunks + 1, 40, generator=drawing).double() + mean) / chunks)
    (total, squares), exact = merged_parts(parts), sum(parts, torch.zeros(40).double())
    *context, new = [rounded(part) for part in parts]

    def join(a: Tensor, b: Tensor) -> Tensor:
        return rounded(a + b)

    for merged in (reduce(join, context), reduce(join, context[::-1]), in_a_tree(context, join)):
        error = (merged + new - exact).abs()  # the result's own rounding is none of a merge's
        assert bool((error <= ROUNDOFF * total).all())
        assert float(error.square().mean()) <= ROUNDOFF**2 * float(squares.mean())


def test_a_merge_of_a_small_share_rounds_little_and_chunks_are_the_states_that_calls_would_return() -> None:
    small, large = torch.full((1,), 2.0**-10).double(), torch.ones(1).double()
    assert float(merged_parts([small, large])[0]) == 1 + 2.0**-10
    assert float(merged_parts([small, small, large])[0]) < 3.1
    drawing = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(rows, 2, 8, generator=drawing).double() for rows in (3, 12, 12))
    scores = torch.einsum("tnd,snd->nts", q, k)

    def state(keys: slice) -> tuple[Tensor, Tensor]:
        part = scores[..., keys]
        return torch.einsum("nts,snv->tnv", part.softmax(dim=-1), v[keys]), part.logsumexp(dim=-1)

    output, lse = state(slice(0, 12))
    states = [state(keys) for keys in (slice(0, 4), slice(4, 9), slice(9, 12))]
    expected = merged_states([o for o, _ in states], [part for _, part in states], lse)
    chunks = partial(merged_chunks, q, k, v, output, lse, rows=[slice(0, 3)], keys=[slice(0, 12)], scale=1.0)
    found = chunks(ends=[(4, 9)])
    torch.testing.assert_close(found, expected)
    nothing, _ = chunks(ends=[()])
    assert not bool(nothing.any())
