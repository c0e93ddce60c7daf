"""From a prefill case to its calls: random operands, or latents from a paged cache, up-projected chunk by chunk."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch

from mla_conformance.backends import declaration, foreign, interface, roles
from mla_conformance.backends.kernel import DeviceCapability, output_dtype
from mla_conformance.backends.metadata import MLACommonPrefillMetadata, chunked_context_metadata, prefill_metadata
from mla_conformance.cases.case import Call
from mla_conformance.problems import memory, operands
from mla_conformance.problems.calls import AttentionCall, AttentionOperands
from mla_conformance.problems.operands import KEYS, VALUES, Draw, lay_out, rows_of, start_loc, stored
from mla_conformance.reference.chunking import PLANNERS, ContextChunk
from mla_conformance.reference.projections import expand_key, kv_b_proj, up_project
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.prefill.case import PrefillCase

ContextKeys = tuple[torch.Tensor, torch.Tensor]  # k [S, N, P + R] and v [S, N, V]


@dataclass(frozen=True, kw_only=True)
class PrefillCall(AttentionCall):  # ``run_prefill_new_tokens`` or ``run_prefill_context_chunk``; widths P + R and V
    chunk_idx: int | None  # the context chunk; None for new tokens
    metadata: MLACommonPrefillMetadata  # of the batch, which all calls of a problem share
    prepares: bool  # whether it is the first of these calls, before which the metadata is handed over
    case: PrefillCase

    @property
    def name(self) -> str:
        return "new tokens" if self.chunk_idx is None else f"context chunk {self.chunk_idx}"

    @property
    def returns_lse(self) -> bool:
        return self.case.lse or self.chunk_idx is not None

    def owned(self) -> dict[str, torch.Tensor]:
        owned = {f"{name} of {self.name}": getattr(self, name) for name in ("q", "k", "v")}
        owned |= {name: getattr(self.metadata, name) for name in ("query_start_loc", "block_table")}
        context = self.metadata.chunked_context
        if context is not None:
            owned |= {name: getattr(context, name) for name in ("cu_seq_lens", "starts", "seq_lens", "workspace")}
        return owned if self.output_scale is None else {**owned, "output_scale": self.output_scale}

    def regrouped(self, case: PrefillCase, requests: Sequence[int], queries: int | None) -> Self:
        bare: Any = {"metadata": None}
        call = super(PrefillCall, replace(self, **bare)).regrouped(case, requests, queries)
        keys = rows_of(self.key_start_loc, requests, queries).to(self.k.device)
        chunks = () if self.chunk_idx is None else one_chunk(call.key_lens)
        lengths = [stop - start for start, stop in pairwise(call.query_start_loc)]
        metadata = assemble_metadata(case, lengths, chunks, self.q.dtype, self.q.device)
        return replace(call, k=self.k[keys], v=self.v[keys], metadata=metadata)

    def output_buffer(self) -> memory.Guarded | None:
        if self.chunk_idx is not None or not (self.case.out or self.output_scale is not None):
            return None
        dtype = output_dtype(self.q.dtype) if self.output_scale is None else torch.float8_e4m3fn
        return memory.Guarded.allocate(self.result_shape, dtype, self.q.device)

    def prepare(self, backend: interface.MLAPrefillBackend) -> None:
        if self.prepares:
            backend.prepare_metadata(self.metadata)

    def invoke(
        self, backend: interface.MLAPrefillBackend, out: memory.Guarded | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.chunk_idx is not None:
            return backend.run_prefill_context_chunk(self.chunk_idx, self.q, self.k, self.v)
        optional = {} if out is None else {"out": out.view}
        optional |= {} if self.output_scale is None else {"output_scale": self.output_scale}
        return backend.run_prefill_new_tokens(self.q, self.k, self.v, return_softmax_lse=self.case.lse, **optional)

    def operands(self) -> AttentionOperands:
        return self.attended(causal=self.chunk_idx is None)


def one_chunk(lengths: Sequence[int]) -> tuple[ContextChunk, ...]:
    return (ContextChunk((0,) * len(lengths), tuple(lengths)),)


def assemble_metadata(
    case: PrefillCase,
    query_lens: Sequence[int],
    chunks: Sequence[ContextChunk],
    dtype: torch.dtype,
    device: torch.device,
    pages: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> MLACommonPrefillMetadata:
    """``pages`` are the block table of a cache, and the workspace that chunks were gathered from it into."""
    if pages is None:
        room = max((1, *(chunk.num_tokens for chunk in chunks))), case.kv_lora_rank + case.rope_dim
        workspace = memory.poison(room, output_dtype(dtype), device, case.poison)
        pages = torch.zeros(len(query_lens), 1, dtype=torch.int32, device=device), workspace
    planned = chunked_context_metadata(chunks, pages[1], device) if chunks else None
    if planned is not None:
        planned.max_seq_lens = [length * case.inflate for length in planned.max_seq_lens]
    metadata = prefill_metadata(query_lens, block_table=pages[0], dtype=dtype, device=device, chunked_context=planned)
    metadata.max_query_len *= case.inflate
    return metadata


_COUNTED_ELEMENTS = 2**24  # elements of the keys from which inputs are drawn on the device, by counters


class PrefillBatch(Draw[PrefillCase]):
    def calls(self) -> tuple[PrefillCall, ...]:
        case, device, pages, chunks = self.case, self.device, None, tuple[ContextChunk, ...]()
        if case.call == Call.CHUNKED_CONTEXT:
            # The cache holds the model's dtype; operands in e4m3 are cast from it where the kernel is called.
            chunks, every, pages = self._latent_context(output_dtype(self.dtype))
            indices = (None, *range(len(chunks)))
            starts = (start_loc(case.q), *(tuple(chunk.key_start_loc) for chunk in chunks))
        else:
            new = case.call == Call.NEW_TOKENS
            lengths, chunks, indices = (case.q, (), (None,)) if new else (case.kv, one_chunk(case.kv), (0,))
            starts, widths = (start_loc(lengths),), (case.head_dim, case.dimensions.v_head_dim)
            k, v = (self._normal(starts[0][-1], case.heads, width) for width in widths)
            every = [(self.by_request(KEYS, k, starts[0]), self.by_request(VALUES, v, starts[0]))]
        keys = [(stored(k, self.dtype), stored(v, self.dtype)) for k, v in every]
        first, *others = zip(keys, starts, strict=True)
        ordered = [*others, first]  # of each request the keys of its context, then the new ones
        # [T, N, P + R] in the operands' dtype; many of them on the device, as keys are.
        normal = self._normal(sum(case.q), case.heads, case.head_dim).float()
        seen = (torch.cat([k[start[n] : start[n + 1]] for (k, _), start in ordered]) for n in range(len(case.q)))
        q = stored(self.queries_of(normal, lambda: seen, causal=case.call != Call.CONTEXT_CHUNK), self.dtype)
        metadata = assemble_metadata(case, case.q, chunks, self.dtype, device, pages)
        scale = torch.tensor(case.oscale / 1e6, dtype=torch.float32, device=device) if case.quant == "fp8" else None
        calls = []
        for chunk_idx, (k, v), start in zip(indices, keys, starts, strict=True):
            rows = [self.padded(x.to(device)) for x in (q, k, v)]
            call = PrefillCall(
                q=lay_out("q", rows[0], rows[1], case),
                k=lay_out("k", rows[1], rows[1], case),
                v=lay_out("v", rows[2], rows[1], case),
                query_start_loc=start_loc(case.q),
                key_start_loc=start,
                chunk_idx=chunk_idx,
                metadata=metadata,
                prepares=chunk_idx is None or case.call == Call.CONTEXT_CHUNK,
                case=case,
                output_scale=scale,
            )
            calls.append(call)
        return tuple(calls)

    def _normal(self, *shape: int) -> torch.Tensor:
        if math.prod(shape) < _COUNTED_ELEMENTS:
            return torch.randn(*shape, generator=self.generator)
        seed = int(torch.randint(2**20, (), generator=self.generator))
        drawn = operands.fill_normal(torch.empty(shape, dtype=self.dtype, device=self.device), seed)
        return drawn.to(output_dtype(self.dtype))  # e4m3 cannot be multiplied, as regimes do

    def _latent_context(
        self, dtype: torch.dtype
    ) -> tuple[tuple[ContextChunk, ...], list[ContextKeys], tuple[torch.Tensor, torch.Tensor]]:
        """Of random latents the planned chunks, k and v of new tokens and of each, block table and workspace."""
        case, device = self.case, self.device
        dims, rank = case.dimensions, case.kv_lora_rank
        normal = partial(torch.randn, generator=self.generator)

        def latents(tokens: int) -> ContextKeys:
            return normal(tokens, rank).to(dtype), normal(tokens, dims.qk_rope_head_dim).to(dtype)

        def keys_of(kv_c: torch.Tensor, k_pe: torch.Tensor, starts: Sequence[int]) -> ContextKeys:
            """As the layer does: one projection in the model's dtype, split into k_nope and v."""
            both = up_project(kv_c.double(), weights.double()).to(kv_c.dtype)
            k_nope, v = both[..., : dims.qk_nope_head_dim], both[..., dims.qk_nope_head_dim :]
            return self.by_request(KEYS, expand_key(k_nope, k_pe), starts), self.by_request(VALUES, v, starts)

        widths = (dims.qk_nope_head_dim, dims.v_head_dim)
        weights = kv_b_proj(*((normal(rank, case.heads, width) * rank**-0.5).to(dtype) for width in widths)).to(device)
        cached, new = latents(sum(case.kv)), latents(sum(case.q))
        chunks = PLANNERS[case.planner](case.kv, workspace_tokens=case.workspace, page_size=case.page)
        workspace = memory.poison((case.workspace, rank + dims.qk_rope_head_dim), dtype, device, case.poison)
        every = [keys_of(new[0].to(device), new[1].to(device), start_loc(case.q))]
        for chunk in chunks:
            parts = zip(start_loc(case.kv), chunk.starts, chunk.seq_lens, strict=False)
            rows = torch.cat([torch.arange(length) + first + start for first, start, length in parts])
            kv_c, k_pe = (x[rows].to(device) for x in cached)
            workspace[: chunk.num_tokens] = torch.cat((kv_c, k_pe), dim=-1)
            every.append(keys_of(kv_c, k_pe, chunk.key_start_loc))
        # [B, max blocks] int32; block 0 stands for the null block that engines keep and never hand out.
        counts = -(-torch.tensor(case.kv) // case.page)
        blocks = torch.randperm(int(counts.sum()), generator=self.drawing(case.seed)) + 1
        table = torch.zeros(len(counts), max(1, int(counts.max())), dtype=torch.int32)
        table[torch.arange(table.shape[1]) < counts[:, None]] = blocks.int()
        return chunks, every, (table.to(device), workspace)


class _Prefill(RoleDefinition):
    def reasons(self, kernel: Any, case: Any, dtype: torch.dtype, capability: DeviceCapability | None) -> list[str]:
        reasons = super().reasons(kernel, case, dtype, capability)
        if (case.lse or case.call != Call.NEW_TOKENS) and not getattr(kernel, "returns_lse", True):
            reasons.append(declaration.NO_LSE)
        if case.own_merge and not hasattr(kernel, "merge_attn_states"):
            reasons.append("no merge_attn_states of its own")
        if case.quant == "none":
            declared = getattr(kernel, "supports_unquantised_output", lambda dtype: True)
            if not foreign.yes_or_no(declared(dtype), "supports_unquantised_output"):
                reasons.append(f"unquantised output of {dtype} not declared")
        if case.quant == "fp8" and not reasons:
            try:
                key = interface.fp8_static_tensor_sym()
            except ValueError as error:
                return [str(error)]
            if not self.kernel(kernel, case, dtype, torch.device("cpu")).supports_quant_output(key):
                reasons.append("fused e4m3 output not declared")
        return reasons


PREFILL = _Prefill(role=roles.Role.PREFILL, batch=PrefillBatch, config=interface.MLAPrefillSelectorConfig)
