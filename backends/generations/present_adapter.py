"""Drives a class of the present generation as vLLM's metadata builder and layer do.

A chunk of a plan names every request, some with no keys in it. The present generation's chunks are runs: neighbouring
requests that all have keys, of which only the first may continue what an earlier chunk began. That layer hands over the
rows that the metadata count and no others, so any further rows of a call stay behind here.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.generations import present
from mla_conformance.backends.generations.adapted import AdaptedPrefillBackend, copied_to, first_columns
from mla_conformance.backends.generations.present import ContextChunk
from mla_conformance.backends.metadata import MLACommonPrefillMetadata, int32


class PresentAdapter(AdaptedPrefillBackend):
    """Stands for one metadata builder, which clones the backend once and prepares the clone for each batch."""

    def _start(self) -> Any:
        original = super()._start()
        clone = original.clone()
        if clone is original or type(clone) is not type(original):
            raise TypeError(f"clone() must return another {type(original).__name__}, got {clone!r}")
        return clone

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        self._plan = planned_runs(prefill_metadata)
        translated = present_metadata(prefill_metadata, self._plan, self._target)
        context = translated.chunked_context
        self._only_chunk = context is not None and len(context.chunks) == 1 and not context.empty_token_slices
        self._output_dtype = translated.output_dtype
        self._query_rows = int(translated.query_start_loc[-1])
        super().prepare_metadata(translated)

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``out`` goes to a backend that supports it, or with a scale; for any other the result is copied to it."""
        rows = self._query_rows
        if rows < q.shape[0]:
            q_rows, k_rows, v_rows = (x[:rows] for x in (q, k, v))
            counted = None if out is None else out[:rows]
            result = self.run_prefill_new_tokens(q_rows, k_rows, v_rows, return_softmax_lse, counted, output_scale)
            output, *lse = result if isinstance(result, tuple) else (result,)
            more = q.shape[0] - rows
            if out is not None and output.data_ptr() == out.data_ptr():
                out[rows:].zero_()
                output = out
            else:
                output = torch.cat([output, output.new_zeros(more, *output.shape[1:])])
            behind = [torch.cat([x, x.new_full((x.shape[0], more), -torch.inf)], dim=1) for x in lse]
            return (output, behind[0]) if behind else output
        supports_out = self._target.supports_out()
        if supports_out or output_scale is not None:
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        result = super().run_prefill_new_tokens(q, k, v, return_softmax_lse)
        result = first_columns(result, self.v_head_dim)
        return result if out is None else copied_to(out, result)

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Call the backend for every run of the chunk; a row of no run is 0 with LSE -inf, as the layer fills it."""
        runs = self._plan[chunk_idx]
        # Requests outside of the runs have no keys, so those of the runs stand end to end.
        keys = [chunk.num_context_tokens for chunk in runs]
        k_parts, v_parts = (x[: sum(keys)].split(keys) for x in (k, v))
        if self._only_chunk and runs[0].token_slice.stop == q.shape[0]:
            return self._call(runs[0], q, k_parts[0], v_parts[0], None)
        output = q.new_zeros(q.shape[0], self.num_heads, self.v_head_dim, dtype=self._output_dtype)
        lse = q.new_full((self.num_heads, q.shape[0]), -torch.inf, dtype=torch.float32)
        # The layer lets a backend write in place unless it merges the result, or takes it as a whole.
        in_place = self._target.supports_out() and not self._only_chunk
        for chunk, k_part, v_part in zip(runs, k_parts, v_parts, strict=True):
            rows = output[chunk.token_slice]
            given = rows if in_place and not chunk.is_continuation else None
            part, part_lse = self._call(chunk, q[chunk.token_slice], k_part, v_part, given)
            if given is None:
                _place("output", part, rows)
            elif part.data_ptr() != rows.data_ptr():
                raise ValueError(f"{self.get_name()} supports out and returned another tensor than the one given")
            _place("lse", part_lse, lse[:, chunk.token_slice])
        return output, lse

    def _call(self, chunk: ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        given = {} if out is None else {"out": out}
        result = self._target.run_prefill_context_chunk(chunk, q, k, v, **given)
        return result if self._target.supports_out() else first_columns(result, self.v_head_dim)


def _place(name: str, part: Tensor, rows: Tensor) -> None:
    """Copy one run's result to its rows of the whole; a copy alone would hide another dtype or a broadcast.

    Raises ValueError: another shape or dtype.
    """
    if part.shape != rows.shape or part.dtype != rows.dtype:
        raise ValueError(
            f"context chunk: expected {name} {list(rows.shape)} {rows.dtype}, got {list(part.shape)} {part.dtype}"
        )
    rows.copy_(part)


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


def planned_runs(metadata: MLACommonPrefillMetadata) -> list[list[ContextChunk]]:
    """The runs of every chunk of the plan, numbered through; empty without cached context."""
    context = metadata.chunked_context
    if context is None:
        return []
    number, rows = count(), _Rows(metadata)
    chunks = zip(context.starts.tolist(), context.seq_lens.tolist(), context.max_seq_lens, strict=True)
    return [
        [rows.chunk(next(number), requests, starts, seq_lens, longest) for requests in runs_of(starts, seq_lens)]
        for starts, seq_lens, longest in chunks
    ]


def present_metadata(
    metadata: MLACommonPrefillMetadata, plan: Sequence[Sequence[ContextChunk]], backend: Any
) -> present.MLACommonPrefillMetadata:
    """The metadata that ``backend`` is prepared with, for a plan of :func:`planned_runs`."""
    context = metadata.chunked_context
    lengths = [] if context is None else context.seq_lens.sum(dim=0).tolist()
    chunks = [chunk for runs in plan for chunk in runs]
    translated = None
    # A batch without any context has no plan there, where ours may plan one chunk of nothing.
    if context is not None and chunks:
        tokens = metadata.query_start_loc.tolist()
        translated = present.ChunkedContextMetadata(
            context_lens=int32(lengths, metadata.query_start_loc.device),
            workspace=context.workspace,
            chunks=chunks,
            context_lens_list=lengths,
            empty_token_slices=[
                slice(tokens[request], tokens[request + 1]) for request, length in enumerate(lengths) if not length
            ],
        )
    return present.MLACommonPrefillMetadata(
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

    def __init__(self, metadata: MLACommonPrefillMetadata) -> None:
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
            query_start_loc=int32(list(accumulate(queries, initial=0)), self.device),
            max_query_len=max(queries) * self.looseness,
            cu_seq_lens=int32(list(accumulate(keys, initial=0)), self.device),
            starts=int32(starts[requests], self.device),
            max_seq_len=max(keys) * (max_seq_len // max(seq_lens)),
            seq_lens=int32(keys, torch.device("cpu")),
            token_to_seq=int32([row for row, length in enumerate(keys) for _ in range(length)], self.device),
            all_rows_active=min(queries) > 0,
            num_local_context_tokens=sum(keys),
        )
