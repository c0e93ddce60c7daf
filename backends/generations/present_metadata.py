"""From the metadata of this project's plans to the chunk objects of the present generation.

A chunk of a plan names every request, some with no keys in it. The present generation's chunks are runs: neighbouring
requests that all have keys, of which only the first may continue what an earlier chunk began.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from mla_conformance.backends.generations.present import ChunkedContextMetadata, ContextChunk, MLACommonPrefillMetadata
from mla_conformance.backends.metadata import MLACommonPrefillMetadata as PlannedMetadata


class Run(NamedTuple):
    """A chunk object, and where its keys stand among those of the plan's chunk."""

    chunk: ContextChunk
    keys: slice


def runs_of(starts: Sequence[int], seq_lens: Sequence[int]) -> Iterator[slice]:
    """The requests of each run of one chunk, given the first context position and the keys of every request."""
    begin = None
    for request, (start, length) in enumerate(zip(starts, seq_lens, strict=True)):
        if begin is not None and (start or not length):
            yield slice(begin, request)
            begin = None
        if begin is None and length:
            begin = request
    if begin is not None:
        yield slice(begin, len(seq_lens))


def planned_runs(metadata: PlannedMetadata) -> list[list[Run]]:
    """The runs of every chunk of the plan, numbered through; empty without cached context."""
    context = metadata.chunked_context
    if context is None:
        return []
    rows = _Rows(metadata)
    plan = []
    number = 0
    for index, (starts, seq_lens) in enumerate(zip(context.starts.tolist(), context.seq_lens.tolist(), strict=True)):
        runs = []
        for requests in runs_of(starts, seq_lens):
            first = sum(seq_lens[: requests.start])
            chunk = rows.chunk(number, requests, starts, seq_lens, context.max_seq_lens[index])
            runs.append(Run(chunk, slice(first, first + chunk.num_context_tokens)))
            number += 1
        plan.append(runs)
    return plan


def present_metadata(
    metadata: PlannedMetadata, plan: Sequence[Sequence[Run]], backend: Any
) -> MLACommonPrefillMetadata:
    """The metadata that ``backend`` is prepared with, for a plan of :func:`planned_runs`."""
    context = metadata.chunked_context
    lengths = [] if context is None else context.seq_lens.sum(dim=0).tolist()
    chunks = [run.chunk for runs in plan for run in runs]
    translated = None
    # A batch without any context has no plan there, where ours may plan one chunk of nothing.
    if context is not None and chunks:
        tokens = metadata.query_start_loc.tolist()
        translated = ChunkedContextMetadata(
            context_lens=_int32(lengths, metadata.query_start_loc.device),
            workspace=context.workspace,
            chunks=chunks,
            context_lens_list=lengths,
            empty_token_slices=[
                slice(tokens[request], tokens[request + 1]) for request, length in enumerate(lengths) if not length
            ],
        )
    return MLACommonPrefillMetadata(
        block_table=metadata.block_table,
        query_start_loc=metadata.query_start_loc,
        max_query_len=metadata.max_query_len,
        chunked_context=translated,
        q_data_type=metadata.q_data_type,
        output_dtype=metadata.output_dtype,
        prefill_backend=backend,
        query_lens_cpu=metadata.query_lens_cpu,
    )


class _Rows:
    """The query rows of a batch, and how loose its maxima are."""

    def __init__(self, metadata: PlannedMetadata) -> None:
        self.device = metadata.query_start_loc.device
        self.starts: list[int] = metadata.query_start_loc.tolist()
        self.lengths: list[int] = metadata.query_start_loc.diff().tolist()
        self.looseness = metadata.max_query_len // max(1, *self.lengths)

    def chunk(
        self, index: int, requests: slice, starts: list[int], seq_lens: list[int], max_seq_len: int
    ) -> ContextChunk:
        """One run; maxima that exceed the true ones exceed the run's by the same factor."""
        queries, keys = self.lengths[requests], seq_lens[requests]
        first = self.starts[requests.start]
        return ContextChunk(
            index=index,
            request_slice=requests,
            token_slice=slice(first, first + sum(queries)),
            continuation_token_end=first + queries[0],
            is_continuation=starts[requests.start] > 0,
            num_context_tokens=sum(keys),
            query_start_loc=_int32(list(accumulate(queries, initial=0)), self.device),
            max_query_len=max(queries) * self.looseness,
            cu_seq_lens=_int32(list(accumulate(keys, initial=0)), self.device),
            starts=_int32(starts[requests], self.device),
            max_seq_len=max(keys) * (max_seq_len // max(seq_lens)),
            seq_lens=_int32(keys, torch.device("cpu")),
            token_to_seq=_int32([row for row, length in enumerate(keys) for _ in range(length)], self.device),
            all_rows_active=min(queries) > 0,
            num_local_context_tokens=sum(keys),
        )


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
