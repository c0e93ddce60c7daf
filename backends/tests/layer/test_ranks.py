"""A layer on ranks that share the tokens: what each holds, what they exchange."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.backends.layer.context_chunks import plan_context, share_context
from mla_conformance.backends.layer.context_parallel import (
    Lockstep,
    Sharding,
    gather_heads,
    local_token,
    merge_over_ranks,
)
from mla_conformance.backends.layer.mla_batch import LayerRequest

CPU = torch.device("cpu")


@settings(max_examples=15, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    page=st.integers(1, 8),
    room=st.integers(0, 40),
    ranks=st.integers(2, 4),
    interleave=st.integers(1, 9),
)
def test_shares_put_in_order_are_the_chunk(
    contexts: list[int], page: int, room: int, ranks: int, interleave: int
) -> None:
    """Each token is sent by its owner, from where the owner has it, and lands where one rank would have gathered it."""
    workspace = page * sum(c > 0 for c in contexts) + room
    plan = plan_context(torch.tensor(contexts), workspace_tokens=workspace, page_size=page, device=CPU)
    assert plan is not None
    every = [shares for r in range(ranks) if (shares := share_context(plan, Sharding(ranks, r, interleave), CPU))]
    seen = [0] * len(contexts)
    for chunk, lengths in enumerate(plan.seq_lens.tolist()):
        sent: list[tuple[int, ...]] = []
        for rank, shares in enumerate(every):
            own = [(rank, *token) for token in _tokens(shares.starts[chunk], shares.cu_seq_lens[chunk].diff())]
            sent += own + [()] * (shares.rows[chunk] - len(own))
        tokens = _tokens(torch.tensor(seen), torch.tensor(lengths))
        owned = [(r, *local_token(torch.tensor(at), Sharding(ranks, 0, interleave))) for r, at in tokens]
        for shares in every:
            assert [sent[row] for row in shares.order[chunk].tolist()] == [(int(o), r, int(at)) for r, o, at in owned]
            assert max(shares.rows[chunk], len(shares.order[chunk])) <= workspace
        seen = [before + length for before, length in zip(seen, lengths, strict=True)]
    assert seen == contexts


def _tokens(starts: torch.Tensor, lengths: torch.Tensor) -> list[tuple[int, int]]:
    """(request, number) of so many tokens of each request."""
    pairs = enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
    return [(request, start + at) for request, (start, length) in pairs for at in range(length)]


def test_heads_are_gathered_in_the_order_of_ranks_and_each_rank_gets_its_own_back() -> None:
    """Rank 1 alone sees keys; what the others return has no weight."""
    lockstep, normal = Lockstep(3), torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(1))
    every = lockstep.run([partial(gather_heads, g, normal[g.rank]) for g in lockstep.groups])
    assert all(x.equal(normal.transpose(0, 1).flatten(1, 2)) for x in every)
    lse, outputs = torch.full((3, 6, 5), -torch.inf), torch.zeros(3, 5, 6, 4)
    lse[1], outputs[1] = 0.5, every[0]
    merged = lockstep.run([partial(merge_over_ranks, g, outputs[g.rank], lse[g.rank]) for g in lockstep.groups])
    assert all(x.equal(normal[rank]) for rank, x in enumerate(merged))


def test_a_rank_that_is_awaited_in_vain_ends_the_others() -> None:
    lockstep = Lockstep(2)
    one, two = lockstep.groups
    with pytest.raises(RuntimeError, match="rank 0 waits in exchange 0, and rank 1 ended before it"):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: None])
    with pytest.raises(ZeroDivisionError):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: 1 // 0])
    with pytest.raises(RuntimeError, match=r"expected tensors of one form from all ranks, got \[\[1\], \[2\]\]"):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: two.all_gather(torch.ones(2))])


def test_metadata_of_another_rank_is_refused(world: Any) -> None:
    w = world(ranks=2)
    metadata = w.builder(1).build_from_requests([LayerRequest(1, 4, [0, 1], False)])
    with pytest.raises(ValueError, match=r"expected metadata of rank 0 of 1, .* got those of rank 1 of 2; construct"):
        w.impl().prepare(metadata)
