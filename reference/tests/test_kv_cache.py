"""Writing latents into pages and collecting them again, and dealing them out to ranks: by hand, and by law."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks
from mla_conformance.reference.kv_cache import gather_latents, local_length, local_positions, write_latents


def test_chunks_collect_what_was_written_and_nothing_else(prefill: Any) -> None:
    context = prefill.context
    plan = plan_context_chunks(context.context_lens, workspace_tokens=8, page_size=4)
    for chunk in plan:
        kv_c, k_pe = gather_latents(context.cache, context.block_table, chunk, kv_lora_rank=32)
        expected = torch.cat(
            [
                request[start : start + length]
                for request, start, length in zip(prefill.latents, chunk.starts, chunk.seq_lens, strict=True)
            ]
        )
        assert kv_c.shape == (chunk.num_tokens, 32) and k_pe.shape == (chunk.num_tokens, 8)
        assert torch.equal(torch.cat((kv_c, k_pe), dim=-1), expected)  # also: no NaN of an unused slot


def test_misfits_are_refused() -> None:
    cache, chunk = torch.zeros(3, 4, 5), ContextChunk(starts=(4,), seq_lens=(5,))
    for slot in (-2, 12):
        with pytest.raises(ValueError, match=r"slots in 0\.\.11"):
            write_latents(cache, torch.ones(2, 3), torch.ones(2, 2), torch.tensor([0, slot]))
    assert (cache == 0).all()
    with pytest.raises(ValueError, match="one slot a token"):
        write_latents(cache, torch.ones(2, 3), torch.ones(2, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match="one slot a token and rows of 5"):
        write_latents(cache, torch.ones(2, 3), torch.ones(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="needs 3 blocks, its row holds 2"):
        gather_latents(cache, torch.tensor([[0, 1]]), chunk, kv_lora_rank=3)
    with pytest.raises(ValueError, match=r"blocks in 0\.\.2"):
        gather_latents(cache, torch.tensor([[0, 1, 3]]), chunk, kv_lora_rank=3)
    with pytest.raises(ValueError, match="block table of 1 rows"):
        gather_latents(cache, torch.tensor([[0, 1, 2]] * 2), chunk, kv_lora_rank=3)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 400), world_size=st.integers(1, 9), interleave=st.integers(1, 70))
def test_every_token_has_one_owner_and_keeps_its_order(length: int, world_size: int, interleave: int) -> None:
    deal = {"world_size": world_size, "interleave": interleave}
    shares = [local_positions(length, rank=rank, **deal) for rank in range(world_size)]
    assert sorted(position for share in shares for position in share) == list(range(length))
    for rank, share in enumerate(shares):
        assert list(share) == sorted(share) and len(share) == local_length(length, rank=rank, **deal)
        assert all(position // interleave % world_size == rank for position in share)


@pytest.mark.parametrize("numbers", [(-1, 0, 2, 1), (3, 2, 2, 1), (3, -1, 2, 1), (3, 0, 2, 0), (3, 0, 0, 1)])
def test_ranks_that_do_not_exist_are_refused(numbers: tuple[int, int, int, int]) -> None:
    length, rank, world_size, interleave = numbers
    with pytest.raises(ValueError, match=f"got {length}, rank {rank} of {world_size} and {interleave}"):
        local_length(length, rank=rank, world_size=world_size, interleave=interleave)
