"""A layer on ranks that share the tokens: what each holds, what they exchange, and that together they are one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.backends.layer.context_chunks import plan_context, share_context
from mla_conformance.backends.layer.context_parallel import (
    Lockstep,
    OnlyRank,
    Sharding,
    dcp_group,
    gather_heads,
    local_token,
    merge_over_ranks,
)
from mla_conformance.backends.layer.mla_batch import LayerRequest

CPU = torch.device("cpu")
PREFILLS = [(5, 21, True), (3, 0, True), (4, 6, True)]


def rank_of(group: Any, whole: Any, world: Any, interleave: int) -> Callable[[], torch.Tensor]:
    """One rank's forward; its cache holds its share of the context, and every rank computes all heads of the batch."""
    w = world(ranks=group.world_size, interleave=interleave)
    with dcp_group(group):
        builder, impl = w.builder(group.rank), w.impl()
    blocks = [list(range(12 * i, 12 * i + 12)) for i in range(len(whole.lengths))]
    before = [LayerRequest(c, 0, ids, True) for (_, c, _), ids in zip(whole.lengths, blocks, strict=True) if c]
    context = torch.cat([rows[:c] for rows, (_, c, _) in zip(whole.latents, whole.lengths, strict=True)])
    slots = builder.build_from_requests(before).slot_mapping
    impl.do_kv_cache_update(context[:, :32], context[:, 32:], w.cache, slots, w.layer._k_scale)
    requests = [LayerRequest(q, c, ids, p) for (q, c, p), ids in zip(whole.lengths, blocks, strict=True)]
    metadata = builder.build_from_requests(requests)
    state = w.backend.get_state_cls()(w.runner())
    state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
    return lambda: impl.forward(w.layer, *whole.operands(), w.cache, metadata)


def test_a_prefill_on_ranks_is_bit_by_bit_that_of_one_rank(world: Any, batch: Any) -> None:
    whole, lockstep = batch(world(), PREFILLS), Lockstep(3)
    alone = rank_of(OnlyRank(), whole, world, 1)()
    for result in lockstep.run([rank_of(group, whole, world, 2) for group in lockstep.groups]):
        assert torch.equal(result, alone)


@settings(max_examples=25, deadline=None)
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
        expected = [(r, *map(int, at)) for r, at in _owned(seen, lengths, Sharding(ranks, 0, interleave))]
        for shares in every:
            assert [sent[row] for row in shares.order[chunk].tolist()] == [(at[1], at[0], at[2]) for at in expected]
            assert max(shares.rows[chunk], len(shares.order[chunk])) <= workspace
        seen = [before + length for before, length in zip(seen, lengths, strict=True)]
    assert seen == contexts


def _tokens(starts: torch.Tensor, lengths: torch.Tensor) -> list[tuple[int, int]]:
    """(request, number) of so many tokens of each request."""
    pairs = enumerate(zip(starts.tolist(), lengths.tolist(), strict=True))
    return [(request, start + at) for request, (start, length) in pairs for at in range(length)]


def _owned(starts: list[int], lengths: list[int], sharding: Sharding) -> list[tuple[int, tuple[Any, Any]]]:
    """(request, (owner, its number there)) of tokens by their positions."""
    tokens = _tokens(torch.tensor(starts), torch.tensor(lengths))
    return [(request, local_token(torch.tensor(position), sharding)) for request, position in tokens]


def test_heads_are_gathered_in_the_order_of_ranks_and_each_rank_gets_its_own_back() -> None:
    lockstep, normal = Lockstep(3), torch.randn(3, 5, 2, 4, generator=torch.Generator().manual_seed(1))
    every = lockstep.run([lambda g=g: gather_heads(g, normal[g.rank]) for g in lockstep.groups])  # type: ignore[misc]
    assert all(x.equal(normal.transpose(0, 1).flatten(1, 2)) for x in every)
    # Rank 1 alone sees keys; what the others return has no weight.
    lse = torch.full((3, 6, 5), -torch.inf)
    lse[1] = 0.5
    outputs = torch.zeros(3, 5, 6, 4)
    outputs[1] = every[0]
    merged = lockstep.run(
        [lambda g=g: merge_over_ranks(g, outputs[g.rank], lse[g.rank]) for g in lockstep.groups]  # type: ignore[misc]
    )
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
