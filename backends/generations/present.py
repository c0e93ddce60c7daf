"""The present generation of the MLA prefill interface, as in vLLM 0.33, and what drives a class of it as vLLM does.

A chunk of it is a run of neighbouring requests that all have keys, of which the first alone may continue a context; one
of ours names every request. Symbols: T query tokens; n requests, t query tokens and s keys of one chunk.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, count
from typing import Any, Self

import torch
from torch import Tensor

from mla_conformance.backends import metadata as ours
from mla_conformance.backends.eager import EagerKernel
from mla_conformance.backends.generations.adapted import AdaptedPrefillBackend, Operands, copied_to, first_columns
from mla_conformance.backends.interface import PrefillKernelBackend
from mla_conformance.backends.kernel import int32


@dataclass
class ContextChunk:
    """A slice of the cached context of a run of requests."""

    index: int  # position in the plan
    request_slice: slice  # the requests of the run
    token_slice: slice  # their query tokens among those of the batch
    continuation_token_end: int  # end of the first request's query tokens in the batch
    is_continuation: bool  # whether an earlier chunk began the first request's context
    num_context_tokens: int  # s
    query_start_loc: Tensor  # [n + 1] int32, on the device, 0 first
    max_query_len: int  # longest query of the run
    cu_seq_lens: Tensor  # [n + 1] int32, on the device; delimits the keys of each request
    starts: Tensor  # [n] int32, on the device; first context position of each request
    max_seq_len: int  # most keys of a request
    seq_lens: Tensor  # [n] int32, on the CPU
    token_to_seq: Tensor  # [s] int32, on the device; the request of each key, counted from the run's first
    all_rows_active: bool  # whether every request has queries and keys
    # with decode context parallelism only, as all that follows but ``num_local_context_tokens``: keys on this rank,
    # padded where ranks share the sequences
    padded_local_seq_lens: list[int] | None = None
    local_context_lens_allranks: list[list[int]] | None = None
    padded_local_cu_seq_lens: Tensor | None = None
    padded_local_token_to_seq: Tensor | None = None
    num_local_context_tokens: int = 0
    local_starts: list[int] | None = None

    @property
    def num_requests(self) -> int:
        return int(self.request_slice.stop - self.request_slice.start)


@dataclass
class ChunkedContextMetadata:
    context_lens: Tensor  # [B] int32, on the device
    workspace: Tensor  # [workspace tokens, L + R], holds a chunk's gathered latents
    chunks: list[ContextChunk]  # in the order in which they are attended to
    context_lens_list: list[int]  # the same lengths, on the host
    empty_token_slices: list[slice]  # query tokens of each request without context
    dcp_manager: Any = None  # collectives of decode context parallelism; None without


@dataclass
class MLACommonPrefillMetadata(ours.MLACommonPrefillMetadata):
    """What a prefill backend may know of a batch, with this generation's chunks."""

    chunked_context: ChunkedContextMetadata | None = None  # type: ignore[assignment]
    prefill_backend: Any = None  # the instance that was prepared with this metadata
    use_dense_mha: bool = False  # a sparse model's choice of dense attention; never here
    topk_mask_workspace: Tensor | None = None  # a sparse model's workspace; never here


class MLAPrefillBackend(PrefillKernelBackend):
    def supports_out(self) -> bool:
        """Whether both entries write a given ``out`` [tokens, N, V] in place; if not, they may return more columns."""
        return False

    def clone(self) -> Self:
        """Another instance of the same configuration; a metadata builder prepares one of its own."""
        return type(self)(**self.sizes)

    @abstractmethod
    def run_prefill_context_chunk(
        self, chunk: ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Unmasked attention of a run's query tokens [t, N, P + R] to its s keys of one chunk: output and lse [N, t].

        ``out`` [t, N, V], to be written in place, is given only to a backend that supports it.
        """


class PresentAdapter(AdaptedPrefillBackend):
    """Stands for one metadata builder, which clones the backend once and prepares the clone for each batch."""

    def _start(self) -> Any:
        original = super()._start()
        clone = original.clone()
        if clone is original or type(clone) is not type(original):
            raise TypeError(f"clone() must return another {type(original).__name__}, got {clone!r}")
        return clone

    def prepare_metadata(self, prefill_metadata: ours.MLACommonPrefillMetadata) -> None:
        self._plan = planned_runs(prefill_metadata)
        starts, context = prefill_metadata.query_start_loc, prefill_metadata.chunked_context
        chunks = [chunk for runs in self._plan for chunk in runs]
        translated, self._only_chunk = None, False
        # A batch without any context has no plan there, where ours may plan one chunk of nothing.
        if context is not None and chunks:
            lengths, tokens = context.seq_lens.sum(dim=0).tolist(), starts.tolist()
            empty = [slice(tokens[row], tokens[row + 1]) for row, length in enumerate(lengths) if not length]
            on_device = int32(lengths, starts.device)
            translated = ChunkedContextMetadata(on_device, context.workspace, chunks, lengths, empty)
            self._only_chunk = len(chunks) == 1 and not empty
        self._output_dtype, self._query_rows = prefill_metadata.output_dtype, int(starts[-1])
        given = {each.name: getattr(prefill_metadata, each.name) for each in fields(prefill_metadata)}
        given |= {"chunked_context": translated, "prefill_backend": self._target}
        super().prepare_metadata(MLACommonPrefillMetadata(**given))

    def _new_tokens(self, operands: Operands, lse: bool, out: Tensor | None, output_scale: Tensor | None) -> Any:
        """``out`` goes to a backend that supports it, or with a scale; for any other the result is copied to it."""
        rows, more = self._query_rows, len(operands[0]) - self._query_rows
        if more > 0:
            q, k, v = (x[:rows] for x in operands)
            result = self._new_tokens((q, k, v), lse, None if out is None else out[:rows], output_scale)
            output, *lses = result if isinstance(result, tuple) else (result,)
            if out is not None and output.data_ptr() == out.data_ptr():
                out[rows:].zero_()
                output = out
            else:
                output = torch.cat([output, output.new_zeros(more, *output.shape[1:])])
            behind = [torch.cat([x, x.new_full((x.shape[0], more), -torch.inf)], dim=1) for x in lses]
            return (output, behind[0]) if behind else output
        if self._target.supports_out() or output_scale is not None:
            return super()._new_tokens(operands, lse, out, output_scale)
        result = first_columns(super()._new_tokens(operands, lse, None, None), self.v_head_dim)
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
            if given is not None and part.data_ptr() != rows.data_ptr():
                raise ValueError(f"{self.get_name()} supports out and returned another tensor than the one given")
            found = [("output", part, rows)] if given is None else []
            for name, got, place in (*found, ("lse", part_lse, lse[:, chunk.token_slice])):
                # A copy alone would hide another dtype or a broadcast.
                if got.shape != place.shape or got.dtype != place.dtype:
                    expected = f"expected {name} {list(place.shape)} {place.dtype}"
                    raise ValueError(f"context chunk: {expected}, got {list(got.shape)} {got.dtype}")
                place.copy_(got)
        return output, lse

    def _call(self, chunk: ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        result = self._target.run_prefill_context_chunk(chunk, q, k, v, **({} if out is None else {"out": out}))
        return result if self._target.supports_out() else first_columns(result, self.v_head_dim)


def planned_runs(metadata: ours.MLACommonPrefillMetadata) -> list[list[ContextChunk]]:
    """The runs of every chunk of a plan, numbered through; loose maxima exceed by the same factor."""
    context, number, device = metadata.chunked_context, count(), metadata.query_start_loc.device
    if context is None:
        return []
    first, queries = metadata.query_start_loc.tolist(), metadata.query_start_loc.diff().tolist()
    looseness = metadata.max_query_len // max(1, *queries)
    plan = []
    chunks = (context.starts.tolist(), context.seq_lens.tolist(), context.max_seq_lens)
    for starts, seq_lens, longest in zip(*chunks, strict=True):
        runs = []
        for run in runs_of(starts, seq_lens):
            own, keys, row = queries[run], seq_lens[run], first[run.start]
            runs.append(
                ContextChunk(
                    index=next(number),
                    request_slice=run,
                    token_slice=slice(row, row + sum(own)),
                    continuation_token_end=row + own[0],
                    is_continuation=starts[run.start] > 0,
                    num_context_tokens=sum(keys),
                    query_start_loc=int32(list(accumulate(own, initial=0)), device),
                    max_query_len=max(own) * looseness,
                    cu_seq_lens=int32(list(accumulate(keys, initial=0)), device),
                    starts=int32(starts[run], device),
                    max_seq_len=max(keys) * (longest // max(seq_lens)),
                    seq_lens=int32(keys, torch.device("cpu")),
                    token_to_seq=int32([place for place, length in enumerate(keys) for _ in range(length)], device),
                    all_rows_active=min(own) > 0,
                    num_local_context_tokens=sum(keys),
                )
            )
        plan.append(runs)
    return plan


def runs_of(starts: Sequence[int], seq_lens: Sequence[int]) -> Iterator[slice]:
    """The requests of each run of one chunk, given the first context position and the keys of every request."""
    begin = None
    for request, (start, length) in enumerate(zip((*starts, 0), (*seq_lens, 0), strict=True)):
        if begin is not None and (start or not length):
            yield slice(begin, request)
            begin = None
        if begin is None and length:
            begin = request


class PresentEagerPrefillBackend(EagerKernel, MLAPrefillBackend):
    variant = "present"

    def supports_out(self) -> bool:
        return True

    def run_prefill_context_chunk(
        self, chunk: ContextChunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        query_start_loc, key_start_loc = chunk.query_start_loc.tolist(), chunk.cu_seq_lens.tolist()
        accumulated, lse = self._batch(q, k, v, query_start_loc, key_start_loc, causal=False)
        return self._store(accumulated, q.dtype, out, None), lse
