"""Laws of the chunk planners, for every batch of contexts."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_conformance.reference.chunking import PLANNERS, ContextChunk, pack_context_chunks, plan_context_chunks

contexts = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=50)
@given(lens=contexts, page_size=st.integers(1, 32), spare=st.integers(0, 200))
def test_plan_covers_every_context_once_within_the_workspace(
    planner: str, lens: list[int], page_size: int, spare: int
) -> None:
    pages = sum(length > 0 for length in lens) if planner == "equal" else 1
    workspace = max(1, pages) * page_size + spare
    plan = PLANNERS[planner](lens, workspace_tokens=workspace, page_size=page_size)
    for request, length in enumerate(lens):
        covered = [
            token
            for chunk in plan
            for token in range(chunk.starts[request], chunk.starts[request] + chunk.seq_lens[request])
        ]
        assert covered == list(range(length))
    assert all(0 < chunk.num_tokens <= workspace for chunk in plan)
    assert all(start % page_size == 0 for chunk in plan for start in chunk.starts)


@settings(max_examples=50)
@given(lens=contexts, page_size=st.integers(1, 32), spare=st.integers(0, 200))
def test_a_packed_chunk_is_a_run_of_rows_of_which_the_first_may_continue(
    lens: list[int], page_size: int, spare: int
) -> None:
    plan = pack_context_chunks(lens, workspace_tokens=page_size + spare, page_size=page_size)
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


def test_prefills_without_context_take_no_share() -> None:
    for planner in PLANNERS.values():
        assert planner([], workspace_tokens=0, page_size=16) == planner([0, 0], workspace_tokens=0, page_size=16) == ()
    (chunk,) = plan_context_chunks([0, 64, 0], workspace_tokens=64, page_size=16)
    assert chunk == ContextChunk(starts=(0, 0, 0), seq_lens=(0, 64, 0))
    assert chunk.key_start_loc == (0, 0, 64, 64) and chunk.num_tokens == 64


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"at least 32 .* got 31; enlarge the workspace"):
        plan_context_chunks([5, 5], workspace_tokens=31, page_size=16)
    with pytest.raises(ValueError, match=r"at least 16 \(one page\), got 15"):
        pack_context_chunks([5], workspace_tokens=15, page_size=16)
    for planner in PLANNERS.values():
        with pytest.raises(ValueError, match="page_size"):
            planner([5], workspace_tokens=16, page_size=0)
        with pytest.raises(ValueError, match="context lengths"):
            planner([-1], workspace_tokens=16, page_size=1)
    with pytest.raises(ValueError, match="2 starts and 1 lengths"):
        ContextChunk(starts=(0, 0), seq_lens=(1,))
    with pytest.raises(ValueError, match=">= 0"):
        ContextChunk(starts=(0,), seq_lens=(-1,))
