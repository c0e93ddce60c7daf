"""The conversions that adapters share."""

import math
from typing import Any

import pytest
import torch

from mla_conformance.backends.conversions import (
    RaggedBatch,
    aligned,
    blank_lse,
    blank_output,
    natural_heads_first,
    pad_head_dim,
    rows_that_count,
)
from mla_conformance.backends.metadata import chunked_context_metadata, prefill_metadata
from mla_conformance.reference.chunking import ContextChunk

_CPU = torch.device("cpu")


def _metadata(queries: Any, context: Any = None) -> Any:
    table = torch.zeros(len(queries), 1, dtype=torch.int32)
    plan = None
    if context:
        chunk = ContextChunk((0,) * len(context), context)
        plan = chunked_context_metadata([chunk], torch.zeros(sum(context), 8), _CPU)
    return prefill_metadata(queries, block_table=table, dtype=torch.bfloat16, device=_CPU, chunked_context=plan)


def test_new_tokens_see_each_other() -> None:
    batch = RaggedBatch.new_tokens(_metadata((3, 0, 5)))
    assert batch.causal
    assert (batch.query_tokens, batch.key_tokens, batch.max_query_len, batch.max_key_len) == (8, 8, 5, 5)
    assert batch.rows_without_keys() is None


def test_rows_of_a_request_without_context_see_no_key() -> None:
    batch = RaggedBatch.context_chunk(_metadata((2, 0, 3, 1), (4, 0, 0, 9)), 0)
    assert not batch.causal
    assert (batch.key_tokens, batch.max_key_len) == (13, 9)
    keyless = batch.rows_without_keys()
    assert keyless is not None
    assert keyless.tolist() == [False, False, True, True, True, False]


def test_a_request_without_queries_and_keys_leaves_no_row_to_blank() -> None:
    assert RaggedBatch.context_chunk(_metadata((2, 0), (4, 0)), 0).rows_without_keys() is None


def test_lengths_are_read_from_the_device_where_the_host_has_none() -> None:
    metadata = _metadata((3, 0, 5))
    metadata.query_lens_cpu = None
    assert RaggedBatch.new_tokens(metadata).query_lens == (3, 0, 5)


def test_a_chunk_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="context chunk 1 asked for"):
        RaggedBatch.context_chunk(_metadata((3,)), 1)


def test_only_rows_without_keys_are_blanked() -> None:
    batch = RaggedBatch.context_chunk(_metadata((1, 2), (4, 0)), 0)
    lse = torch.tensor([[math.inf, math.nan, -5e4], [1.0, 2.0, 3.0]])
    assert blank_lse(lse, batch).tolist() == [[math.inf, -math.inf, -math.inf], [1.0, -math.inf, -math.inf]]
    output = torch.full((3, 2, 4), math.nan)
    assert blank_output(output, batch).isnan().all(dim=-1).all(dim=-1).tolist() == [True, False, False]


def test_base_two_token_first_becomes_natural_head_first() -> None:
    lse = torch.tensor([[1.0, 2.0], [3.0, -math.inf], [0.0, 4.0]])
    converted = natural_heads_first(lse)
    assert converted.shape == (2, 3)
    assert converted[0, 1].item() == pytest.approx(3 * math.log(2))
    assert converted[1, 1].item() == -math.inf


def test_padding_adds_zeros_and_nothing_where_nothing_is_missing() -> None:
    x = torch.ones(2, 3, 5)
    assert pad_head_dim(x, 5) is x
    assert pad_head_dim(x, 8)[..., 5:].abs().sum() == 0


@pytest.mark.parametrize(
    ("view", "kept"),
    [
        (lambda x: x, True),
        (lambda x: x[..., 8:24], True),  # starts and strides are multiples of 16 bytes
        (lambda x: x[..., 4:20], False),  # starts in between
        (lambda x: x[..., ::2], False),  # columns apart
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.flatten()[: 3 * 2 * 20].view(3, 2, 20)[..., :16], False),  # every other row starts in between
    ],
    ids=["packed", "slice", "odd slice", "columns apart", "heads first", "odd width"],
)
def test_operands_are_copied_only_if_a_row_starts_in_between(view: Any, kept: Any) -> None:
    x = view(torch.randn(3, 2, 32).bfloat16())
    copy = aligned(x)
    assert (copy is x) == kept
    assert torch.equal(copy, x)
    assert aligned(copy) is copy


def test_padded_rows_are_dropped() -> None:
    start = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    batch = RaggedBatch(None, start, start, (2, 0, 1), (2, 0, 1))
    lse = torch.arange(6.0).view(3, 2, 1)
    assert rows_that_count(lse, batch).tolist() == [[0.0, 1.0, 4.0]]


def test_empty_requests_can_be_left_out() -> None:
    batch = RaggedBatch.new_tokens(_metadata((0, 3, 0, 0, 5, 0))).without_empty_requests()
    assert (batch.query_lens, batch.key_lens, batch.causal) == ((3, 5), (3, 5), True)
    assert batch.query_start_loc.tolist() == batch.key_start_loc.tolist() == [0, 3, 8]
