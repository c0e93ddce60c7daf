"""The conversions that adapters share."""

from typing import Any

import pytest
import torch

from mla_conformance.backends.conversions import (
    RaggedBatch,
    aligned,
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


def test_lengths_are_read_from_the_device_where_the_host_has_none() -> None:
    metadata = _metadata((3, 0, 5))
    metadata.query_lens_cpu = None
    assert RaggedBatch.new_tokens(metadata).query_lens == (3, 0, 5)


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
