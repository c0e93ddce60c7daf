"""Metadata of a prefill batch, fields as in vLLM's ``MLACommonPrefillMetadata``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla_conformance.backends.kernel import int32, output_dtype
from mla_conformance.reference.chunking import ContextChunk


@dataclass
class ChunkedContextMetadata:
    """The chunks in which cached context is attended to; B requests, C chunks."""

    cu_seq_lens: Tensor  # [C, B + 1] int32, on the device; row c delimits chunk c's keys per request
    starts: Tensor  # [C, B] int32, on the device; first context position of each request in the chunk
    seq_tot: list[int]  # keys of each chunk
    max_seq_lens: list[int]  # longest request of each chunk, in keys
    seq_lens: Tensor  # [C, B] int32, on the CPU
    workspace: Tensor  # [workspace tokens, L + R], receives a chunk's gathered latents


@dataclass
class MLACommonPrefillMetadata:
    block_table: Tensor  # [B, max blocks] int32; physical block of each page of a request's context
    query_start_loc: Tensor  # [B + 1] int32, on the device
    max_query_len: int  # longest query in tokens
    chunked_context: ChunkedContextMetadata | None = None  # None when no request has cached context
    q_data_type: torch.dtype | None = None  # dtype of the queries
    output_dtype: torch.dtype | None = None  # dtype of the unquantised output
    query_lens_cpu: Tensor | None = None  # [B] int32, on the CPU


def chunked_context_metadata(
    chunks: Sequence[ContextChunk], workspace: Tensor, device: torch.device
) -> ChunkedContextMetadata:
    """Tensors of a plan of chunks, which names every request and fits the workspace [tokens, L + R]."""
    if not chunks:
        raise ValueError("expected at least one context chunk, got none; pass chunked_context=None instead")
    largest = max(chunk.num_tokens for chunk in chunks)
    if largest > workspace.shape[0]:
        raise ValueError(f"a chunk of {largest} tokens does not fit a workspace of {workspace.shape[0]} tokens")
    return ChunkedContextMetadata(
        cu_seq_lens=int32([chunk.key_start_loc for chunk in chunks], device),
        starts=int32([chunk.starts for chunk in chunks], device),
        seq_tot=[chunk.num_tokens for chunk in chunks],
        max_seq_lens=[max(chunk.seq_lens) for chunk in chunks],
        seq_lens=int32([chunk.seq_lens for chunk in chunks], torch.device("cpu")),
        workspace=workspace,
    )


def prefill_metadata(
    query_lens: Sequence[int],
    *,
    block_table: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    chunked_context: ChunkedContextMetadata | None = None,
) -> MLACommonPrefillMetadata:
    """Metadata of a batch of prefills, of ``query_lens`` new tokens; the device reads the offsets."""
    requests = len(query_lens)
    if requests == 0 or min(query_lens) < 0:
        raise ValueError(f"expected one non-negative query length per request, got {list(query_lens)}")
    if chunked_context is not None and chunked_context.starts.shape[1] != requests:
        raise ValueError(f"the context plan has {chunked_context.starts.shape[1]} requests, the batch {requests}")
    return MLACommonPrefillMetadata(
        block_table=block_table,
        query_start_loc=int32(list(accumulate(query_lens, initial=0)), device),
        max_query_len=max(query_lens),
        chunked_context=chunked_context,
        q_data_type=dtype,
        output_dtype=output_dtype(dtype),
        query_lens_cpu=int32(query_lens, torch.device("cpu")),
    )
