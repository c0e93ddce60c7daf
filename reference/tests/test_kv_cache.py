"""Contexts in chunks, by law; latents written into pages, collected again, and dealt out to ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference import cache_layout, chunking

contexts = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@pytest.mark.parametrize("planner", chunking.PLANNERS)
@settings(max_examples=40, deadline=None)
@given(lens=contexts, page_size=st.integers(1, 32), spare=st.integers(0, 200))
def test_plans_cover_every_context_once(planner: str, lens: list[int], page_size: int, spare: int) -> None:
    pages = sum(length > 0 for length in lens) if planner == "equal" else 1
    workspace = max(1, pages) * page_size + spare
    plan = chunking.PLANNERS[planner](lens, workspace_tokens=workspace, page_size=page_size)
    for request, length in enumerate(lens):
        spans = [range(chunk.starts[request], chunk.starts[request] + chunk.seq_lens[request]) for chunk in plan]
        covered = [token for span in spans for token in span]
        assert covered == list(range(length))
    assert all(0 < chunk.num_tokens <= workspace for chunk in plan)
    assert all(start % page_size == 0 for chunk in plan for start in chunk.starts)


@settings(max_examples=40, deadline=None)
@given(lens=contexts, page_size=st.integers(1, 32), spare=st.integers(0, 200))
def test_a_packed_chunk_is_a_run_of_rows(lens: list[int], page_size: int, spare: int) -> None:
    plan = chunking.pack_context_chunks(lens, workspace_tokens=page_size + spare, page_size=page_size)
    for chunk in plan:
        first, *others = [request for request, length in enumerate(chunk.seq_lens) if length]
        assert others == list(range(first + 1, first + 1 + len(others)))
        assert all(chunk.starts[request] == 0 for request in others)
    for chunk, following in pairwise(plan):
        split = max(request for request, length in enumerate(chunk.seq_lens) if length)
        end = chunk.starts[split] + chunk.seq_lens[split]
        room = page_size + spare - chunk.num_tokens
        # A chunk ends at a context that does not fit, having taken all whole pages of it, or before an empty one.
        assert room < page_size or (end == lens[split] and lens[split + 1] == 0)
        assert following.starts[split] == (end if end < lens[split] else 0)


def test_prefills_without_context_take_no_share_and_refusals_say_what_to_do() -> None:
    for planner in chunking.PLANNERS.values():
        assert planner([], workspace_tokens=0, page_size=16) == planner([0, 0], workspace_tokens=0, page_size=16) == ()
    (chunk,) = chunking.plan_context_chunks([0, 64, 0], workspace_tokens=64, page_size=16)
    assert chunk.key_start_loc == (0, 0, 64, 64)
    with pytest.raises(ValueError, match=r"at least 32 .* got 31; enlarge the workspace"):
        chunking.plan_context_chunks([5, 5], workspace_tokens=31, page_size=16)
    with pytest.raises(ValueError, match=r"at least 16 \(one page\), got 15"):
        chunking.pack_context_chunks([5], workspace_tokens=15, page_size=16)


def test_chunks_collect_what_was_written_and_misfits_are_refused(prefill: Any) -> None:
    context = prefill.context
    plan = chunking.plan_context_chunks(context.context_lens, workspace_tokens=8, page_size=4)
    for chunk in plan:
        found = context.gathered(chunk)
        spans = map(slice, chunk.starts, map(sum, zip(chunk.starts, chunk.seq_lens, strict=True)))
        expected = torch.cat([request[span] for request, span in zip(prefill.latents, spans, strict=True)])
        assert torch.equal(found, expected)  # also: no NaN of an unused slot
    cache = torch.zeros(3, 4, 5)
    for slot in (-2, 12):
        with pytest.raises(ValueError, match=r"slots in 0\.\.11"):
            cache_layout.write_rows(cache, torch.ones(2, 5), torch.tensor([0, slot]))
    assert (cache == 0).all()
    with pytest.raises(ValueError, match="one slot a token"):
        cache_layout.write_rows(cache, torch.ones(2, 5), torch.tensor([0]))
    with pytest.raises(ValueError, match="one slot a token and rows of 5"):
        cache_layout.write_rows(cache, torch.ones(2, 6), torch.tensor([0, 1]))


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 400), world_size=st.integers(1, 9), interleave=st.integers(1, 70))
def test_every_token_has_one_owner_and_keeps_its_order(length: int, world_size: int, interleave: int) -> None:
    deal = {"world_size": world_size, "interleave": interleave}
    shares = [cache_layout.local_positions(length, rank=rank, **deal) for rank in range(world_size)]
    assert sorted(position for share in shares for position in share) == list(range(length))
    for rank, share in enumerate(shares):
        assert list(share) == sorted(share) and len(share) == cache_layout.local_length(length, rank=rank, **deal)
        assert all(position // interleave % world_size == rank for position in share)
