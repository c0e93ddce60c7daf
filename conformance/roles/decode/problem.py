"""From a decode case to calls: latents in a paged cache, on one rank or on several, absorbed queries, metadata."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from mla_conformance.backends import decode, roles
from mla_conformance.cases.case import Layout
from mla_conformance.problems import cached_batch, calls, memory, operands
from mla_conformance.reference.cache_layout import local_length
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.definition import KERNEL_SIZES, RoleDefinition


@dataclass(frozen=True, kw_only=True)
class DecodeCall(calls.AttentionCall):
    """``run_decode`` on one rank; q, k and v are what it means: [T, N, L + R], [S, 1, L + R], [S, 1, L] in float64."""

    metadata: decode.MLACommonDecodeMetadata
    case: DecodeCase

    interface: ClassVar = decode.MLADecodeBackend
    means: ClassVar = {"q": "T", "k": "S", "v": "S"}

    @property
    def returns_lse(self) -> bool:
        return self.case.lse or self.case.ranks > 1  # a case that is about outputs leaves it to others

    @property
    def holds_codes(self) -> bool:  # which files of roles ask a call for
        return self.case.holds_codes

    def invoke(self, backend: decode.MLADecodeBackend, out: memory.Guarded | None) -> Any:
        result = super().invoke(backend, out)
        return result if self.returns_lse else decode.output_of(result)

    def operands(self) -> calls.AttentionOperands:
        whole, metadata = self.attended(causal=True), self.metadata
        if metadata.dcp_tot_seq_lens is None:
            return whole
        # Each query stands for itself. The causal bound refers to the whole sequence, so what it sees are the first few
        # of this rank's keys, but not those of an aligned triangle.
        interleave = metadata.cp_kv_cache_interleave_size
        share = partial(local_length, rank=metadata.dcp_rank, world_size=metadata.dcp_world_size, interleave=interleave)
        totals = metadata.dcp_tot_seq_lens.tolist()
        batch = zip(operands.segments(self.query_start_loc), totals, self.key_start_loc, strict=False)
        seen = [
            slice(first, first + share(max(0, total - rows.stop + row + 1)))
            for rows, total, first in batch
            for row in range(rows.start, rows.stop)
        ]
        rows = torch.cat([torch.arange(keys.start, keys.stop, device=self.k.device) for keys in seen])
        queries, keys = tuple(range(len(seen) + 1)), operands.start_loc([keys.stop - keys.start for keys in seen])
        of_rank = self.q, self.k[rows], self.v[rows], queries, keys
        return calls.AttentionOperands(*of_rank, causal=False, dequantised=whole.dequantised)


class DecodeBatch(cached_batch.CachedBatch[DecodeCase]):
    @cached_property
    def queries(self) -> torch.Tensor:
        case = self.case
        q = torch.randn(sum(case.q), case.heads, sum(case.latent_dims), generator=self.generator)
        return self.padded(self.queries_of(q, self.keys_by_request).to(self.dtype))

    def calls(self) -> tuple[DecodeCall, ...]:
        _ = self.entries, self.queries  # drawn in this order, whatever asks first
        q, case = self.queries, self.case
        ql_nope, q_pe = q[..., : case.kv_lora_rank], q[..., case.kv_lora_rank :]
        if case.layout != Layout.KV_B_PROJ:
            ql_nope, q_pe = operands.lay_out("q", ql_nope, ql_nope, case), operands.lay_out("q", q_pe, q_pe, case)
        else:  # as in a model: the transposed result of the product with W_UK, and a slice of the projected query
            wide = memory.poison((*q.shape[:2], case.dimensions.qk_head_dim), q.dtype, q.device, case.poison)
            view = wide[..., case.dimensions.qk_nope_head_dim :]
            ql_nope, q_pe = ql_nope.transpose(0, 1).contiguous().transpose(0, 1), view.copy_(q_pe)
        made, given = list[DecodeCall](), {"ql_nope": ql_nope, "q_pe": q_pe}
        for rank in range(case.ranks):
            held, every = self.held(rank)
            lengths = list(map(len, held))
            pages = cached_batch.write_pages(self, self.entries[every], lengths, case.cache, case.page)
            told = {"block_table": pages.block_table, **self.metadata(lengths, rank)}
            told |= {"dcp_tot_seq_lens": cached_batch.int32(self.totals, self.device)} if case.ranks > 1 else {}
            call = DecodeCall(
                **self.attended(self.keys[every], lengths),
                given={**given, "kv_cache": pages.cache, "k_scale": self.k_scale},
                metadata=decode.MLACommonDecodeMetadata(**told),
                case=case,
            )
            made.append(call)
        return tuple(made)


DECODE = RoleDefinition(
    role=roles.Role.DECODE,
    batch=DecodeBatch,
    config=decode.MLADecodeSelectorConfig,
    constructed=(*KERNEL_SIZES, "kv_cache_dtype"),
    # of all requests, or of those of a layer's batch that decode; ranks are merged by their LSE
    facts=lambda case, dtype: {
        "max_query_len": max(case.decode_queries),
        "uniform": len(set(case.decode_queries)) == 1,
        "lse": case.lse or case.ranks > 1,
    },
)
