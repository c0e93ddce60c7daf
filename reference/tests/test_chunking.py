"""Laws of the chunk planner, for every batch of contexts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks

contexts = st.lists(st.integers(0, 300), min_size=1, max_size=6)


@given(lens=contexts, page_size=st.integers(1, 32), spare=st.integers(0, 200))
def test_plan_covers_every_context_once_within_the_workspace(lens: list[int], page_size: int, spare: int) -> None:
    workspace = max(1, sum(length > 0 for length in lens)) * page_size + spare
    plan = plan_context_chunks(lens, workspace_tokens=workspace, page_size=page_size)
    for request, length in enumerate(lens):
        covered = [
            token
            for chunk in plan
            for token in range(chunk.starts[request], chunk.starts[request] + chunk.seq_lens[request])
        ]
        assert covered == list(range(length))
    assert all(0 < chunk.num_tokens <= workspace for chunk in plan)
    assert all(start % page_size == 0 for chunk in plan for start in chunk.starts)


@given(lens=contexts)
def test_a_large_workspace_needs_one_chunk(lens: list[int]) -> None:
    plan = plan_context_chunks(lens, workspace_tokens=len(lens) * 512, page_size=16)
    assert len(plan) == (1 if any(lens) else 0)


def test_prefills_without_context_take_no_share() -> None:
    (chunk,) = plan_context_chunks([0, 64, 0], workspace_tokens=64, page_size=16)
    assert chunk == ContextChunk(starts=(0, 0, 0), seq_lens=(0, 64, 0))
    assert chunk.key_start_loc == (0, 0, 64, 64) and chunk.num_tokens == 64


@pytest.mark.parametrize("lens", [[], [0, 0]])
def test_no_context_no_plan(lens: list[int]) -> None:
    assert plan_context_chunks(lens, workspace_tokens=0, page_size=16) == ()


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"at least 32 .* got 31; enlarge the workspace"):
        plan_context_chunks([5, 5], workspace_tokens=31, page_size=16)
    with pytest.raises(ValueError, match="page_size"):
        plan_context_chunks([5], workspace_tokens=16, page_size=0)
    with pytest.raises(ValueError, match="context lengths"):
        plan_context_chunks([-1], workspace_tokens=16, page_size=1)
    with pytest.raises(ValueError, match="2 starts and 1 lengths"):
        ContextChunk(starts=(0, 0), seq_lens=(1,))
    with pytest.raises(ValueError, match=">= 0"):
        ContextChunk(starts=(0,), seq_lens=(-1,))
