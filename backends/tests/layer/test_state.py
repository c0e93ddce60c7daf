"""What lives longer than a batch: the next step, graph buffers, the workspace; and ranks that share the tokens."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.layer.context_parallel import Lockstep
from mla_conformance.backends.layer.mla_batch import LayerRequest


def inputs(tokens: int) -> Any:
    return SimpleNamespace(**{f"input_{name}": torch.zeros(tokens).long() for name in ("tokens", "positions")})


@pytest.mark.parametrize("seed", range(4))
def test_advancing_is_rebuilding(seed: int, world: Any, same: Any) -> None:
    rng = random.Random(seed)
    prompts = rng.randint(0, 3)
    number = rng.randint(max(prompts, 1), 5)
    lengths = [(rng.randint(1, 9) if i < prompts else 1, rng.randint(0, 20)) for i in range(number)]
    blocks = [rng.sample(range(64), 10) for _ in lengths]
    padding = rng.choice((-1, 0, 3)) if not prompts else -1
    builder, rows = world().builder(), len(lengths) + max(padding, 0)
    metadata = builder.build_from_requests(
        [LayerRequest(q, c, ids, i < prompts) for i, ((q, c), ids) in enumerate(zip(lengths, blocks, strict=True))],
        padding,
    )
    pointers = [metadata.slot_mapping.data_ptr(), metadata.seq_lens_tensor.data_ptr()]
    for step in range(3):
        given = inputs(rows)
        sampled = torch.arange(len(lengths)) + 10 * step
        metadata.advance_step(given, sampled, 4, rows, len(lengths), turn_prefills_into_decodes=step == 0)
        after = [LayerRequest(1, q + c + step, ids, False) for (q, c), ids in zip(lengths, blocks, strict=True)]
        same(metadata, builder.build_from_requests(after, padding))
        assert given.input_tokens[: len(lengths)].equal(sampled)
        assert given.input_positions[: len(lengths)].tolist() == [r.context_len for r in after]
    assert prompts or pointers == [metadata.slot_mapping.data_ptr(), metadata.seq_lens_tensor.data_ptr()]


def test_a_step_moves_every_query_and_no_padding_and_what_is_none_is_refused(world: Any) -> None:
    requests = [LayerRequest(1, 2, [0], False), LayerRequest(1, 3, [5, 3], False)]
    metadata, given = world().builder().build_from_requests(requests, 2), inputs(4)
    slots = metadata.slot_mapping.tolist()
    metadata.advance_step(given, torch.tensor([100, 101]), 4, 4, num_queries=0)
    assert metadata.seq_lens_tensor.tolist() == [3, 4, 0, 0] and metadata.slot_mapping.tolist() == slots
    metadata.advance_step(given, torch.tensor([[100], [101]]), 4, 4, num_queries=2)
    assert given.input_tokens.tolist() == [100, 101, 0, 0] and given.input_positions.tolist()[:2] == [3, 4]
    assert metadata.seq_lens_tensor.tolist() == [4, 5, 0, 0]
    assert metadata.slot_mapping.tolist() == [3, 12, *slots[2:]]
    plain: Any = [(1, 4, [0, 1], False)]
    for batch, seqs, queries, ranks, said in (
        ([(4, 4, [0, 1], True)], 1, 1, 1, "a batch of decodes, got 1 prefills; pass turn_prefills_into_decodes"),
        ([(2, 4, [0, 1], False)], 1, 1, 1, "decodes of one token, got up to 2; build the next step's metadata"),
        (plain, 2, 1, 1, "num_seqs 1, .* got 2 and 1"),
        (plain, 1, 2, 1, "num_seqs 1, .* got 1 and 2"),
        (plain, 1, 1, 2, "cannot advance on 2 context-parallel ranks"),
        ([(1, 7, [5, 3], False)], 1, 1, 1, "next token of a sequence of 8 needs 3 blocks of 4 tokens, a row holds 2"),
    ):
        metadata = world(ranks=ranks).builder().build_from_requests([LayerRequest(*each) for each in batch])
        with pytest.raises(ValueError, match=said):
            metadata.advance_step(inputs(1), None, 4, seqs, queries)


@pytest.fixture
def captured(world: Any) -> Any:
    """A batch of eight rows over a state's buffers; ``load(*requests)`` fills them for a replay."""
    w = world()
    state = w.backend.get_state_cls()(w.runner(max_batch=8))
    with state.graph_capture(8):
        metadata = state.graph_capture_get_metadata_for_batch(8)
    buffers = state.get_graph_input_buffers(metadata)

    def load(*requests: Any) -> None:
        made = w.builder().build_from_requests([LayerRequest(*each) for each in requests])
        state.prepare_graph_input_buffers(buffers, made)

    return SimpleNamespace(state=state, metadata=metadata, buffers=buffers, load=load)


def test_capturing_has_an_inside_and_an_outside_and_a_replay_that_does_not_fit_is_refused(captured: Any) -> None:
    state = captured.state
    for call in (state.graph_clone, state.graph_capture_get_metadata_for_batch):
        with pytest.raises(ValueError, match="graph buffers exist inside of"):
            call(1)
    with state.graph_capture(4):
        clone = state.graph_clone(4)
        assert type(clone) is type(state) and clone is not state
        for rows in (0, 5):
            with pytest.raises(ValueError, match=f"a batch of 1..4 requests, the captured buffers', got {rows}"):
                state.graph_capture_get_metadata_for_batch(rows)
    for call, *given in (
        (state.get_graph_input_buffers, captured.metadata),
        (state.prepare_graph_input_buffers, captured.buffers, captured.metadata),
        (state.graph_capture_get_metadata_for_batch, 1),
    ):
        with pytest.raises(NotImplementedError, match="does not serve encoder-decoder models"):
            call(*given, True)
    # One that fits fills the buffers, of its blocks as many as they have room for.
    captured.load((1, 7, list(range(20)), False))
    assert captured.buffers["seq_lens_tensor"].tolist() == captured.buffers["seq_lens_cpu"].tolist() == [8, *[0] * 7]
    assert captured.buffers["block_tables"][0].tolist() == list(range(16))
    assert (captured.buffers["slot_mapping"][1:] == -1).all() and (captured.buffers["block_tables"][1:] == -1).all()
    for requests, said in (
        ([(1, 1, [0], False)] * 9, "up to 8 decode tokens, as captured, got 0 prefills and 9 decode tokens"),
        ([(2, 0, [0], True)], "as captured, got 1 prefills and 0 decode tokens; run it without the graph"),
        ([(1, 64, list(range(17)), False)], "sequences of up to 64 tokens, as captured, got 65"),
    ):
        with pytest.raises(ValueError, match=said):
            captured.load(*requests)


def test_the_workspace_is_allocated_once_and_bound(world: Any) -> None:
    w = world()
    state = w.backend.get_state_cls()(w.runner())
    bound = []
    for _ in range(2):
        metadata = w.builder().build_from_requests([LayerRequest(4, 5, [0, 1, 2], True)])
        state.begin_forward(SimpleNamespace(attn_metadata=metadata, input_tokens=torch.zeros(1)))
        bound.append(metadata.prefill_metadata.chunked_context.workspace)
    assert bound[0] is bound[1] and bound[0].shape == (64, 40) and bound[0].dtype == torch.float32
    runner = w.runner()
    runner.scheduler_config.chunked_prefill_enabled = False
    state = w.backend.get_state_cls()(runner)
    state.begin_forward(SimpleNamespace())
    assert state.context_chunk_workspace is None and state.context_chunk_workspace_size == 0


def test_a_rank_that_is_awaited_in_vain_ends_the_others_and_metadata_of_another_are_refused(world: Any) -> None:
    lockstep = Lockstep(2)
    one, two = lockstep.groups
    with pytest.raises(RuntimeError, match="rank 0 waits in exchange 0, and rank 1 ended before it"):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: None])
    with pytest.raises(ZeroDivisionError):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: 1 // 0])
    with pytest.raises(RuntimeError, match=r"expected tensors of one form from all ranks, got \[\[1\], \[2\]\]"):
        lockstep.run([lambda: one.all_gather(torch.ones(1)), lambda: two.all_gather(torch.ones(2))])
    w = world(ranks=2)
    metadata = w.builder(1).build_from_requests([LayerRequest(1, 4, [0, 1], False)])
    with pytest.raises(ValueError, match=r"expected metadata of rank 0 of 1, .* got those of rank 1 of 2; construct"):
        w.impl().prepare(metadata)
