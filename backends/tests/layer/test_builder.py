"""Metadata by both routes: fields, agreement, another block table, and refusals of contradictory batches."""

from typing import Any

import pytest
import torch

from mla_conformance.backends import block_size
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.layer import attention_impl, mla_batch
from mla_conformance.backends.layer.mla_batch import LayerRequest, count_decodes

CPU = torch.device("cpu")


def common(queries: list[int], seqs: list[int], **changes: Any) -> attention_impl.CommonAttentionMetadata:
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    lengths = torch.tensor(seqs, dtype=torch.int32)
    given: dict[str, Any] = {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lengths}
    given |= {"num_reqs": len(queries), "num_actual_tokens": sum(queries)}
    given |= {"max_query_len": max(queries, default=0), "max_seq_len": max(seqs, default=0)}
    given |= {"block_table_tensor": torch.zeros(len(queries), 8, dtype=torch.int32)}
    given |= {"slot_mapping": torch.zeros(max(sum(queries), 0), dtype=torch.int64)}
    return attention_impl.CommonAttentionMetadata(**(given | changes))


def test_fields_that_the_layer_itself_does_not_read(world: Any) -> None:
    """What it reads shows in its results, which the suite judges."""
    requests = (5, 6, [3, 9, 1], True), (2, 0, [0], True), (3, 2, [4, 6, -7], False)  # blocks behind may be anything
    metadata = world().builder().build_from_requests([LayerRequest(*each) for each in requests])
    assert (metadata.num_prefill_tokens, metadata.num_decode_tokens) == (7, 3)
    assert metadata.context_lens_tensor.tolist() == [6, 0, 2] and metadata.seq_start_loc.tolist() == [0, 11, 13, 18]
    assert (metadata.max_prefill_seq_len, metadata.max_decode_seq_len) == (11, 5)
    assert metadata.block_tables.tolist() == [[3, 9, 1], [0, 0, 0], [4, 6, -7]]
    assert {getattr(metadata, n).dtype for n in ("seq_lens_tensor", "query_start_loc", "block_tables")} == {torch.int32}
    assert metadata.decode_metadata is metadata.decode_metadata


def test_another_block_table_is_another_build(world: Any, batch: Any, same: Any) -> None:
    one = batch(world(), [(1, 9, False), (3, 2, False), (9, 6, True)])
    builder = one.world.builder()
    assert builder.supports_update_block_table
    metadata, other = builder.build(0, one.common()), one.common()
    assert metadata.prefill_metadata is not None and metadata.decode_metadata is not None
    other.block_table_tensor, other.slot_mapping = other.block_table_tensor.flip(1), other.slot_mapping + 1
    updated = builder.update_block_table(metadata, other.block_table_tensor, other.slot_mapping)
    same(updated, builder.build(0, other))
    assert metadata.decode_metadata.block_table.equal(one.common().block_table_tensor[:2])


def test_the_threshold_counts_drafts_where_the_kernel_takes_several(world: Any) -> None:
    exact = world().decode
    single = type("Single", (exact,), {"supported_query_len": 1})
    assert world().builder().reorder_batch_threshold == 8
    assert world(speculative=None).builder().reorder_batch_threshold == 1
    assert world(decode=single).builder().reorder_batch_threshold == 1
    assert world(ranks=2).builder().reorder_batch_threshold == 1
    causal = type("Causal", (exact,), {"supports_causal_dcp": True})
    assert world(ranks=2, decode=causal).builder().reorder_batch_threshold == 8
    assert world(decode=None).builder().reorder_batch_threshold is None
    # Graphs have the support of the decode backend without prefills.
    for level in AttentionCGSupport:
        decode = type("Level", (exact,), {"cudagraph_support": level})
        support = world(decode=decode).backend.get_builder_cls().get_cudagraph_support(None, None)
        assert support == (AttentionCGSupport.UNIFORM_BATCH if level == AttentionCGSupport.ALWAYS else level)
    assert world(decode=None).backend.get_builder_cls().get_cudagraph_support(None, None) == AttentionCGSupport.NEVER


# What vLLM 0.33's `split_decodes_and_prefills` gives for (query lengths, threshold, uniform).
SPLITS: dict[Any, int] = {((1, 1, 9), 1, False): 2, ((1, 9, 2), 8, False): 1, ((2, 1, 0), 8, False): 3}
SPLITS |= {((1, 0), 1, True): 2, ((3, 3, 0, 0), 3, True): 4, ((3, 0, 9), 3, True): 2}


def test_a_batch_is_split_as_vllm_splits_it(world: Any) -> None:
    """Where queries must be uniform, and where nothing decodes, too."""
    for (query_lens, threshold, alike), decodes in SPLITS.items():
        assert count_decodes(torch.tensor(query_lens), threshold, alike) == decodes, query_lens
    uniform = type("Uniform", (world().decode,), {"supports_nonuniform_queries": False})
    padded = common([3, 3, 0, 0], [9, 8, 0, 0], num_actual_tokens=12, slot_mapping=torch.full((12,), -1))
    metadata = world(decode=uniform, speculative=2).builder().build_for_cudagraph_capture(padded)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (4, 0, 12)
    metadata = world(decode=uniform).builder().build(0, common([3, 3, 2, 3, 9], [9, 9, 9, 9, 9]))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 3, 6)
    metadata = world(decode=None).builder().build(0, common([1, 9, 1], [1, 9, 1]))
    assert (metadata.num_decodes, metadata.num_prefills) == (0, 3)


def test_capture_drafting_and_cascade_and_the_workspace_rule(world: Any, same: Any) -> None:
    builder = world().builder()
    decodes = common([1, 1], [4, 5])
    assert builder.build_for_cudagraph_capture(decodes).use_cuda_graph
    same(builder.build_for_drafting(decodes, 0), builder.build(0, decodes))
    assert not builder.use_cascade_attention(9, [1], 8, 1, False, False, False, 132, 1)
    with pytest.raises(ValueError, match="captured with decodes only, of up to 8 tokens, got 1 prefills of up to 9"):
        builder.build_for_cudagraph_capture(common([9], [9]))

    def tokens(max_model_len: int, max_seqs: int, page: int) -> int:
        config = world(max_model_len=max_model_len, max_seqs=max_seqs).config
        config.cache_config.block_size = page
        return mla_batch.workspace_tokens(config)

    assert (tokens(1000, 4, 16), tokens(10, 4, 16), tokens(163840, 256, 64)) == (8000, 256, 131072)
    assert tokens(163840, 2048, 64) == 131072
    with pytest.raises(ValueError, match=r"a page for each request, 2049 requests x 64 tokens, got 131072 tokens"):
        tokens(163840, 2049, 64)


CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "query longer": (common([1, 5], [4, 4]), "request 1: expected a query of no more tokens than its sequence"),
    "negative query": (common([2, -1], [4, 4]), "request 1: expected a query of 0 or more tokens, got query_len -1"),
    "negative sequence": (common([1, 0], [4, -2]), "request 1: expected a sequence of 0 or more tokens, .* seq_len -2"),
    "short table": (common([1, 1], [4, 33]), "table is too short: expected 2 rows for up to 33 tokens in blocks of 4"),
    "few slots": (common([1, 1], [4, 4], slot_mapping=torch.zeros(1)), "expected 2 tokens .* and 1 slots"),
    "empty": (common([], []), "at least one request, with a query and a sequence, got num_reqs 0"),
    "too few lengths": (common([1, 1], [4]), "got num_reqs 2, 2 queries and 1 sequences"),
    "not causal": (common([1], [4], causal=False), "attends causally, got causal=False"),
    "decode first": ([(1, 4, [0, 1], False), (4, 0, [2], True)], "got a prefill as request 1 of 2, behind a decode"),
    "short table of one": ([(4, 1, [7], True)], "request 0: .* is too short: 5 tokens need 2 blocks of 4, got 1"),
    "query of no tokens": ([(-1, 4, [0], False)], "request 0: expected a query of 0 or more .*, got query_len -1"),
    "negative context": ([(1, -1, [0], False)], "request 0: expected a context of 0 or more .* got -1"),
    "negative block": ([(4, 4, [3, -1], True)], "request 0: expected blocks >= 0, got -1"),
    "none": ([], "at least one request and no negative padding, got 0 and 0"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_batch_that_contradicts_itself_is_refused(name: str, world: Any) -> None:
    batch, message = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message):
        if isinstance(batch, list):
            world().builder().build_from_requests([LayerRequest(*request) for request in batch])
        else:
            world().builder().build(0, batch)


def test_context_needs_a_workspace_and_sizes_that_the_kernel_lacks_are_refused(world: Any, batch: Any) -> None:
    one = batch(world(), [(4, 5, True)])
    with pytest.raises(ValueError, match=r"need a workspace, got none; call MLACommonState.begin_forward first"):
        _ = one.world.builder().build_from_requests(one.requests).prefill_metadata
    one.world.config.scheduler_config.chunked_prefill_enabled = False
    with pytest.raises(ValueError, match="up to 5 tokens of context need chunked prefill or prefix caching, got neit"):
        one.world.builder().build_from_requests(one.requests)
    few = batch(world(max_seqs=1, max_model_len=1), [(1, 2, True)] * 5)
    with pytest.raises(ValueError, match=r"at least 20 \(5 contexts of one page of 4 tokens\), got 16; enlarge"):
        few.world.builder().build_from_requests(few.requests)
    sized = type("Sized", (world().decode,), {"supported_latent_dims": [(512, 64)]})
    with pytest.raises(ValueError, match=r"expected a head size of \[576\], got 40; it is L \+ R"):
        world(decode=sized).builder()
    sizes = staticmethod(lambda: [block_size.MultipleOf(32)])
    paged = type("Paged", (world().decode,), {"get_supported_kernel_block_sizes": sizes})
    with pytest.raises(ValueError, match=r"expected a block size of \[MultipleOf\(32\)\], got 4 tokens"):
        world(decode=paged).builder()
    w = world()
    with pytest.raises(ValueError, match=r"expected a block size of .* got 0 tokens"):
        w.backend.get_builder_cls()(mla_batch.MLAAttentionSpec(block_size=0, head_size=40), [], w.config, CPU)
