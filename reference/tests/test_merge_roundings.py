"""What merging rounds: parts that are stored in bf16 and merged in any usual order stay within the sum of the terms."""

from collections.abc import Callable
from functools import partial, reduce

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.roundings import merged_chunks, merged_parts, merged_states

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
    terms, exact = merged_parts(parts), sum(parts, torch.zeros(40).double())
    *context, new = [rounded(part) for part in parts]

    def join(a: Tensor, b: Tensor) -> Tensor:
        return rounded(a + b)

    for merged in (reduce(join, context), reduce(join, context[::-1]), in_a_tree(context, join)):
        error = (merged + new - exact).abs()  # the result's own rounding is none of a merge's
        assert bool((error <= ROUNDOFF * terms.total).all())
        assert float(error.square().mean()) <= ROUNDOFF**2 * float(terms.squares.mean())


def test_a_merge_of_a_small_share_rounds_little() -> None:
    small, large = torch.full((1,), 2.0**-10).double(), torch.ones(1).double()
    assert float(merged_parts([small, large]).total) == 1 + 2.0**-10
    assert float(merged_parts([small, small, large]).total) < 3.1


def test_chunks_of_a_request_are_the_states_that_its_calls_would_return() -> None:
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
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(found.squares, expected.squares)
    nothing = chunks(ends=[()])
    assert not bool(nothing.total.any())
