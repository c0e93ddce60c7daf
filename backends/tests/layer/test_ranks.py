"""A layer on ranks that share the tokens: what each holds, what they exchange."""

from functools import partial
from typing import Any

import pytest
import torch

from mla_conformance.backends.layer.context_parallel import Lockstep, gather_heads, merge_over_ranks
from mla_conformance.backends.layer.mla_batch import LayerRequest

CPU = torch.device("cpu")


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
