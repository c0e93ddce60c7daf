"""Metadata: the fields a kernel reads, and refusals of plans that contradict the batch."""

import pytest
import torch

from mla_conformance.backends.metadata import MLACommonPrefillMetadata, chunked_context_metadata, prefill_metadata
from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks

CPU = torch.device("cpu")
WORKSPACE = torch.empty(64, 40)


def batch(*query_lens: int, contexts: tuple[int, ...] = ()) -> MLACommonPrefillMetadata:
    chunks = plan_context_chunks(contexts, workspace_tokens=64, page_size=16)
    context = chunked_context_metadata(chunks, WORKSPACE, CPU) if chunks else None
    table = torch.zeros(len(query_lens), 1, dtype=torch.int32)
    return prefill_metadata(query_lens, block_table=table, dtype=torch.bfloat16, device=CPU, chunked_context=context)


def test_offsets_of_the_queries() -> None:
    metadata = batch(5, 0, 9)
    assert metadata.query_start_loc.tolist() == [0, 5, 5, 14] and metadata.query_start_loc.dtype == torch.int32
    assert metadata.max_query_len == 9 and metadata.chunked_context is None
    assert metadata.query_lens_cpu is not None and metadata.query_lens_cpu.tolist() == [5, 0, 9]


def test_offsets_of_the_context() -> None:
    context = batch(5, 1, 9, contexts=(40, 0, 70)).chunked_context
    assert context is not None
    assert context.seq_lens.tolist() == [[32, 0, 32], [8, 0, 32], [0, 0, 6]]
    assert context.cu_seq_lens.tolist() == [[0, 32, 32, 64], [0, 8, 8, 40], [0, 0, 0, 6]]
    assert context.starts.tolist() == [[0, 0, 0], [32, 32, 32], [64, 64, 64]]
    assert (context.seq_tot, context.max_seq_lens) == ([64, 40, 6], [32, 32, 6])


@pytest.mark.parametrize("lengths", [(), (3, -1)])
def test_a_batch_needs_non_negative_lengths(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected one non-negative query length per request, got"):
        prefill_metadata(lengths, block_table=torch.zeros(1, 1), dtype=torch.bfloat16, device=CPU)


def test_a_plan_for_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="context plan has 3 requests, the batch 2"):
        batch(5, 9, contexts=(40, 0, 70))


def test_a_plan_without_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one context chunk, got none; pass chunked_context=None"):
        chunked_context_metadata([], WORKSPACE, CPU)


def test_a_chunk_larger_than_the_workspace_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk of 65 tokens does not fit a workspace of 64 tokens"):
        chunked_context_metadata([ContextChunk((0, 0), (1, 64))], WORKSPACE, CPU)
