"""What lives longer than a batch: the next decode step, graph buffers, the workspace."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_conformance.backends.layer.layer_config import SchedulerConfig
from mla_conformance.backends.layer.mla_batch import LayerRequest


def inputs(tokens: int) -> Any:
    return SimpleNamespace(input_tokens=torch.zeros(tokens).long(), input_positions=torch.zeros(tokens).long())


@pytest.mark.parametrize("seed", range(4))
def test_advancing_is_rebuilding(seed: int, world: Any, same: Any) -> None:
    rng = random.Random(seed)
    prompts = rng.randint(0, 3)
    lengths = [
        (rng.randint(1, 9) if i < prompts else 1, rng.randint(0, 20)) for i in range(rng.randint(max(prompts, 1), 5))
    ]
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


def test_a_step_moves_every_query_and_no_padding(world: Any) -> None:
    requests = [LayerRequest(1, 2, [0], False), LayerRequest(1, 3, [5, 3], False)]
    metadata, given = world().builder().build_from_requests(requests, 2), inputs(4)
    slots = metadata.slot_mapping.tolist()
    metadata.advance_step(given, torch.tensor([100, 101]), 4, 4, num_queries=0)
    assert metadata.seq_lens_tensor.tolist() == [3, 4, 0, 0] and metadata.slot_mapping.tolist() == slots
    metadata.advance_step(given, torch.tensor([[100], [101]]), 4, 4, num_queries=2)
    assert given.input_tokens.tolist() == [100, 101, 0, 0] and given.input_positions.tolist()[:2] == [3, 4]
    assert metadata.seq_lens_tensor.tolist() == [4, 5, 0, 0]
    assert metadata.slot_mapping.tolist() == [3, 12, *slots[2:]]


def test_what_is_no_decode_step_is_refused(world: Any) -> None:
    builder = world().builder()
    metadata = builder.build_from_requests([LayerRequest(4, 4, [0, 1], True)])
    with pytest.raises(ValueError, match="a batch of decodes, got 1 prefills; pass turn_prefills_into_decodes"):
        metadata.advance_step(inputs(1), None, 4, 1, 1)
    metadata = builder.build_from_requests([LayerRequest(2, 4, [0, 1], False)])
    with pytest.raises(ValueError, match="decodes of one token, got up to 2; build the next step's metadata"):
        metadata.advance_step(inputs(1), None, 4, 1, 1)
    metadata = builder.build_from_requests([LayerRequest(1, 4, [0, 1], False)])
    for seqs, queries in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=f"num_seqs 1, .* got {seqs} and {queries}"):
            metadata.advance_step(inputs(1), None, 4, seqs, queries)
    metadata = world(ranks=2).builder().build_from_requests([LayerRequest(1, 4, [0, 1], False)])
    with pytest.raises(ValueError, match="cannot advance on 2 context-parallel ranks"):
        metadata.advance_step(inputs(1), None, 4, 1, 1)
    metadata = builder.build_from_requests([LayerRequest(1, 2, [0], False), LayerRequest(1, 7, [5, 3], False)])
    with pytest.raises(ValueError, match="next token of a sequence of 8 needs 3 blocks of 4 tokens, a row holds 2"):
        metadata.advance_step(inputs(2), None, 4, 2, 2)


class Captured:
    """A batch of eight rows over a state's buffers, and replays of smaller batches on it."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.state = world.backend.get_state_cls()(world.runner(max_batch=8))
        with self.state.graph_capture(8):
            self.metadata = self.state.graph_capture_get_metadata_for_batch(8)
        self.buffers = self.state.get_graph_input_buffers(self.metadata)


def test_a_replay_that_does_not_fit_is_refused(world: Any, batch: Any) -> None:
    """One that fits fills the buffers, of its blocks as many as they have room for."""
    captured = Captured(world())
    fitting = captured.world.builder().build_from_requests([LayerRequest(1, 7, list(range(20)), False)])
    captured.state.prepare_graph_input_buffers(captured.buffers, fitting)
    assert captured.buffers["seq_lens_tensor"].tolist() == captured.buffers["seq_lens_cpu"].tolist() == [8, *[0] * 7]
    assert captured.buffers["block_tables"][0].tolist() == list(range(16))
    assert (captured.buffers["slot_mapping"][1:] == -1).all() and (captured.buffers["block_tables"][1:] == -1).all()
    with pytest.raises(ValueError, match="up to 8 decode tokens, as captured, got 0 prefills and 9 decode tokens"):
        many = captured.world.builder().build_from_requests(batch(captured.world, [(1, 1, False)] * 9).requests)
        captured.state.prepare_graph_input_buffers(captured.buffers, many)
    prefill = captured.world.builder().build_from_requests([LayerRequest(2, 0, [0], True)])
    with pytest.raises(ValueError, match="as captured, got 1 prefills and 0 decode tokens; run it without the graph"):
        captured.state.prepare_graph_input_buffers(captured.buffers, prefill)
    long = captured.world.builder().build_from_requests([LayerRequest(1, 64, list(range(17)), False)])
    with pytest.raises(ValueError, match="sequences of up to 64 tokens, as captured, got 65"):
        captured.state.prepare_graph_input_buffers(captured.buffers, long)


def test_capturing_has_an_inside_and_an_outside(world: Any) -> None:
    state = Captured(world()).state
    for call in (state.graph_clone, state.graph_capture_get_metadata_for_batch):
        with pytest.raises(ValueError, match="graph buffers exist inside of"):
            call(1)
    with state.graph_capture(4):
        clone = state.graph_clone(4)
        assert type(clone) is type(state) and clone is not state
        for rows in (0, 5):
            with pytest.raises(ValueError, match=f"a batch of 1..4 requests, the captured buffers', got {rows}"):
                state.graph_capture_get_metadata_for_batch(rows)


def test_encoder_decoder_models_are_refused(world: Any) -> None:
    captured = Captured(world())
    for call in (
        lambda: captured.state.get_graph_input_buffers(captured.metadata, True),
        lambda: captured.state.prepare_graph_input_buffers(captured.buffers, captured.metadata, True),
        lambda: captured.state.graph_capture_get_metadata_for_batch(1, True),
    ):
        with pytest.raises(NotImplementedError, match="does not serve encoder-decoder models"):
            call()


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
    runner.scheduler_config = SchedulerConfig(max_num_seqs=4, chunked_prefill_enabled=False)
    state = w.backend.get_state_cls()(runner)
    state.begin_forward(SimpleNamespace())
    assert state.context_chunk_workspace is None and state.context_chunk_workspace_size == 0
