"""A call of a prefill backend, and the metadata of its batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from mla_conformance.backends.interface import MLAPrefillBackend
from mla_conformance.backends.kernel import output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata, chunked_context_metadata, prefill_metadata
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.reference.chunking import ContextChunk
from mla_conformance.roles.prefill.case import PrefillCase
from mla_conformance.roles.prefill.context import LatentContext


@dataclass(frozen=True, kw_only=True)
class PrefillCall(AttentionCall):
    """``run_prefill_new_tokens`` or ``run_prefill_context_chunk``; widths P + R and V."""

    chunk_idx: int | None  # the context chunk; None for new tokens
    metadata: MLACommonPrefillMetadata  # of the batch, which all calls of a problem share
    prepares: bool  # whether it is the first of these calls, before which the metadata is handed over
    lse: bool  # whether new tokens are asked for the LSE
    out_dtype: torch.dtype | None  # dtype of the output tensor that is handed in; None where none is

    @property
    def name(self) -> str:
        return "new tokens" if self.chunk_idx is None else f"context chunk {self.chunk_idx}"

    @property
    def returns_lse(self) -> bool:
        """Of a context chunk always."""
        return self.lse or self.chunk_idx is not None

    def owned(self) -> dict[str, torch.Tensor]:
        owned = {f"{name} of {self.name}": getattr(self, name) for name in ("q", "k", "v")}
        owned |= {name: getattr(self.metadata, name) for name in ("query_start_loc", "block_table")}
        context = self.metadata.chunked_context
        if context is not None:
            owned |= {name: getattr(context, name) for name in ("cu_seq_lens", "starts", "seq_lens", "workspace")}
        return owned if self.output_scale is None else {**owned, "output_scale": self.output_scale}

    def regrouped(self, case: PrefillCase, requests: Sequence[int], queries: int | None) -> Self:
        """Of new tokens the keys are cut with the queries."""
        rows = [list(range(s.start, s.stop))[:queries] for s in segments(self.query_start_loc)]
        seen = [list(range(s.start, s.stop)) for s in segments(self.key_start_loc)]
        keys = rows if self.chunk_idx is None else seen
        query_lens, key_lens = ([len(numbers[request]) for request in requests] for numbers in (rows, keys))
        new, picked = (
            torch.tensor([row for request in requests for row in numbers[request]], dtype=torch.long).to(self.q.device)
            for numbers in (rows, keys)
        )
        chunks = () if self.chunk_idx is None else one_chunk(key_lens)
        return replace(
            self,
            q=self.q[new],
            k=self.k[picked],
            v=self.v[picked],
            query_start_loc=start_loc(query_lens),
            key_start_loc=start_loc(key_lens),
            metadata=assemble_metadata(case, query_lens, chunks, self.q.dtype, self.q.device),
        )

    def output_buffer(self) -> Guarded | None:
        if self.chunk_idx is not None or self.out_dtype is None:
            return None
        return Guarded.allocate((*self.q.shape[:2], self.v.shape[-1]), self.out_dtype, self.q.device)

    def prepare(self, backend: MLAPrefillBackend) -> None:
        """Once for all calls of a problem."""
        if self.prepares:
            backend.prepare_metadata(self.metadata)

    def invoke(
        self, backend: MLAPrefillBackend, out: Guarded | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.chunk_idx is not None:
            return backend.run_prefill_context_chunk(self.chunk_idx, self.q, self.k, self.v)
        optional: dict[str, torch.Tensor] = {}
        if out is not None:
            optional["out"] = out.view
        if self.output_scale is not None:
            optional["output_scale"] = self.output_scale
        return backend.run_prefill_new_tokens(self.q, self.k, self.v, return_softmax_lse=self.lse, **optional)

    def operands(self) -> AttentionOperands:
        return AttentionOperands(
            self.q, self.k, self.v, self.query_start_loc, self.key_start_loc, self.chunk_idx is None
        )


def one_chunk(lengths: Sequence[int]) -> tuple[ContextChunk, ...]:
    """The plan whose only chunk holds every request's whole context."""
    return (ContextChunk((0,) * len(lengths), tuple(lengths)),)


def assemble_metadata(
    case: PrefillCase,
    query_lens: Sequence[int],
    chunks: Sequence[ContextChunk],
    dtype: torch.dtype,
    device: torch.device,
    context: LatentContext | None = None,
) -> MLACommonPrefillMetadata:
    """Metadata of a batch; its maxima are inflated as the case says."""
    width = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    largest = max((chunk.num_tokens for chunk in chunks), default=0)
    room = (max(1, largest), width)
    workspace = context.workspace if context else poison(room, output_dtype(dtype), device, case.poison)
    planned = chunked_context_metadata(chunks, workspace, device) if chunks else None
    if planned is not None:
        planned.max_seq_lens = [length * case.inflate for length in planned.max_seq_lens]
    blocks = context.block_table if context else torch.zeros(len(query_lens), 1, dtype=torch.int32, device=device)
    metadata = prefill_metadata(query_lens, block_table=blocks, dtype=dtype, device=device, chunked_context=planned)
    metadata.max_query_len *= case.inflate
    return metadata
