"""From a decode case to calls: latents in a paged cache, on one rank or on several, absorbed queries, metadata."""

from functools import cached_property

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata, MLADecodeSelectorConfig
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Layout
from mla_conformance.problems.cached_batch import CachedBatch, PageForm, int32, write_pages
from mla_conformance.problems.calls import AttentionOperands
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import lay_out, start_loc
from mla_conformance.roles.decode.call import DecodeCall
from mla_conformance.roles.decode.case import DecodeCase
from mla_conformance.roles.definition import KERNEL_SIZES, RoleDefinition


class DecodeBatch(CachedBatch[DecodeCase]):
    """The batch of a decode case, before and after its tokens are dealt out to ranks."""

    @cached_property
    def queries(self) -> torch.Tensor:
        """[T, N, L + R] in the model's dtype, on the device; rows of padding are poison."""
        case = self.case
        q = torch.randn(sum(case.q), case.heads, sum(case.latent_dims), generator=self.generator)
        q = self.queries_of(q, lambda: self.sites(q))
        return self.padded(q.to(self.dtype))

    @property
    def whole(self) -> AttentionOperands | None:
        if not self.case.is_merged:
            return None
        keys, values = self.keys, self.keys[..., : self.case.kv_lora_rank]
        starts = (self.query_start_loc, start_loc(self.totals))
        return AttentionOperands(self.queries, keys, values, *starts, causal=True, dequantised=self.case.holds_codes)

    def calls(self) -> tuple[DecodeCall, ...]:
        _ = self.entries, self.queries  # drawn in this order, whatever asks first
        q, case = self.queries, self.case
        ql_nope, q_pe = q[..., : case.kv_lora_rank], q[..., case.kv_lora_rank :]
        if case.layout != Layout.KV_B_PROJ:
            ql_nope, q_pe = lay_out("q", ql_nope, ql_nope, case), lay_out("q", q_pe, q_pe, case)
        else:  # as in a model: the transposed result of the product with W_UK, and a slice of the projected query
            wide = poison((*q.shape[:2], case.dimensions.qk_head_dim), q.dtype, q.device, case.poison)
            view = wide[..., case.dimensions.qk_nope_head_dim :]
            ql_nope, q_pe = ql_nope.transpose(0, 1).contiguous().transpose(0, 1), view.copy_(q_pe)
        calls, cpu = list[DecodeCall](), torch.device("cpu")
        for rank in range(case.ranks):
            held, every = self.held(rank)
            lengths = list(map(len, held))
            pages = write_pages(self, PageForm(case.cache, case.page), self.entries[every], lengths)
            keys = self.keys[every]
            metadata = MLACommonDecodeMetadata(
                block_table=pages.block_table,
                seq_lens=int32(lengths, self.device),
                query_start_loc=int32(self.query_start_loc, self.device),
                max_query_len=max(self.query_lens) * case.inflate,
                max_seq_len=max(1, *lengths) * case.inflate,
                query_lens_cpu=int32(self.query_lens, cpu),
                seq_lens_cpu=int32(lengths, cpu),
                dcp_world_size=case.ranks,
                dcp_rank=rank,
                cp_kv_cache_interleave_size=case.interleave,
                dcp_tot_seq_lens=int32(self.totals, self.device) if case.ranks > 1 else None,
            )
            calls.append(
                DecodeCall(
                    q=self.queries,
                    k=keys,
                    v=keys[..., : case.kv_lora_rank],
                    query_start_loc=self.query_start_loc,
                    key_start_loc=start_loc(lengths),
                    given={"ql_nope": ql_nope, "q_pe": q_pe, "kv_cache": pages.cache, "k_scale": self.k_scale},
                    metadata=metadata,
                    holds_codes=case.holds_codes,
                    lse=case.lse,
                )
            )
        return tuple(calls)


DECODE = RoleDefinition(
    role=Role.DECODE,
    batch=DecodeBatch,
    config=MLADecodeSelectorConfig,
    constructed=(*KERNEL_SIZES, "kv_cache_dtype"),
    # of all requests, or of those of a layer's batch that decode; ranks are merged by their LSE
    facts=lambda case, dtype: {
        "max_query_len": max(case.decode_queries),
        "uniform": len(set(case.decode_queries)) == 1,
        "lse": case.lse or case.ranks > 1,
    },
)
