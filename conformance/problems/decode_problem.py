"""From a decode case to calls: latents in a paged cache, on one rank or on several, absorbed queries, metadata."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch

from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.cases.case import Case, Layout
from mla_conformance.cases.hazards import Site
from mla_conformance.problems.calls import AttentionCall, Question
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import Draw, edges, lay_out, segments, start_loc
from mla_conformance.problems.paging import write_pages
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.sharding import local_length, local_positions

if TYPE_CHECKING:
    from mla_conformance.problems.problem import Problem


@dataclass(frozen=True)
class DecodeCall(AttentionCall):
    """``run_decode`` on one rank; q, k and v are what it means: [T, N, L + R], [S, 1, L + R] and [S, 1, L] in float64.

    Attributes:
        ql_nope: [T, N, L], as handed over.
        q_pe: [T, N, R], as handed over.
        kv_cache: [blocks, page, width].
        k_scale: float32 scalar.
        metadata: of the batch on this rank.
    """

    ql_nope: torch.Tensor
    q_pe: torch.Tensor
    kv_cache: torch.Tensor
    k_scale: torch.Tensor
    metadata: MLACommonDecodeMetadata

    @property
    def name(self) -> str:
        """How messages call it."""
        return "decode" if self.metadata.dcp_world_size == 1 else f"rank {self.metadata.dcp_rank}"

    def returns_lse(self, problem: "Problem") -> bool:
        """Always."""
        return True

    def judges_lse(self, problem: "Problem") -> bool:
        """As the case says: one that is about outputs leaves the LSE to others."""
        return problem.case.lse

    def owned(self) -> dict[str, torch.Tensor]:
        """The operands, and every tensor of the metadata."""
        named = {name: getattr(self, name) for name in ("ql_nope", "q_pe", "kv_cache", "k_scale")}
        named |= {field.name: getattr(self.metadata, field.name) for field in fields(self.metadata)}
        return {f"{name} of {self.name}": x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def overwritten(self, other: Self) -> Self:
        """What the operands mean changes with them."""
        return replace(super().overwritten(other), q=other.q, k=other.k, v=other.v)

    def prepare(self, backend: Any, problem: "Problem") -> None:
        """Before every call: each rank has metadata of its own."""
        backend.prepare_metadata(self.metadata)

    def invoke(self, backend: Any, problem: "Problem", out: Guarded | None) -> Any:
        """``run_decode``."""
        return backend.run_decode(self.ql_nope, self.q_pe, self.kv_cache, self.k_scale)

    def question(self, problem: "Problem") -> Question:
        """The attention that the call computes; on one of several ranks each query stands for itself.

        There the causal bound refers to the whole sequence, so the keys that a query sees on this rank are the first
        few, but not those of an aligned triangle.
        """
        quantised = problem.case.cache != "auto"
        if self.metadata.dcp_world_size == 1:
            return Question(self.q, self.k, self.v, problem.query_start_loc, self.key_start_loc, True, quantised)
        seen = self._visible_keys(problem)
        rows = torch.cat([torch.arange(keys.start, keys.stop, device=self.k.device) for keys in seen])
        keys = start_loc([keys.stop - keys.start for keys in seen])
        return Question(self.q, self.k[rows], self.v[rows], tuple(range(len(seen) + 1)), keys, False, quantised)

    def _visible_keys(self, problem: "Problem") -> list[slice]:
        """The keys of this rank that each query sees."""
        assert self.metadata.dcp_tot_seq_lens is not None
        share = partial(local_length, rank=self.metadata.dcp_rank, world_size=self.metadata.dcp_world_size)
        share = partial(share, interleave=self.metadata.cp_kv_cache_interleave_size)
        queries, totals = segments(problem.query_start_loc), self.metadata.dcp_tot_seq_lens.tolist()
        return [
            slice(first, first + share(max(0, total - rows.stop + row + 1)))
            for rows, total, first in zip(queries, totals, self.key_start_loc, strict=False)
            for row in range(rows.start, rows.stop)
        ]


def regrouped_metadata(metadata: MLACommonDecodeMetadata, requests: Sequence[int]) -> MLACommonDecodeMetadata:
    """Metadata of some of a batch's requests on one rank, in the given order; the maxima stay as they are."""
    rows = list(requests)
    query_lens = metadata.query_lens_cpu[rows]
    return replace(
        metadata,
        block_table=metadata.block_table[rows],
        seq_lens=metadata.seq_lens[rows],
        query_start_loc=torch.tensor(start_loc(query_lens.tolist())).to(metadata.query_start_loc),
        query_lens_cpu=query_lens,
        seq_lens_cpu=metadata.seq_lens_cpu[rows],
    )


class DecodeBatch(Draw):
    """The batch of a decode case, before and after its tokens are dealt out to ranks."""

    @cached_property
    def query_lens(self) -> tuple[int, ...]:
        """Query tokens of each request, rows of padding last."""
        return self.case.q + (1,) * self.case.pad

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        """First query token of each request, and the end."""
        return start_loc(self.query_lens)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Cached tokens of each request on all ranks, its new ones included; none of a row of padding."""
        return tuple(q + kv for q, kv in zip(self.case.q, self.case.kv, strict=True)) + (0,) * self.case.pad

    @cached_property
    def k_scale(self) -> torch.Tensor:
        """Float32 scalar on the device."""
        return torch.tensor(self.case.kscale / 1e6, dtype=torch.float32, device=self.device)

    @cached_property
    def entries(self) -> torch.Tensor:
        """[S, width] entries of all tokens, on the CPU."""
        case, rank = self.case, self.case.kv_lora_rank
        width = rank + case.dimensions.qk_rope_head_dim
        keys = self.regime.keys(torch.randn(sum(self.totals), 1, width, generator=self.generator))[:, 0]
        kv_c = self.regime.values(keys[:, :rank])
        return encode(kv_c.to(self.dtype), keys[:, rank:].to(self.dtype), case.cache, float(self.k_scale))

    @cached_property
    def keys(self) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what the entries mean."""
        case = self.case
        dims = (case.kv_lora_rank, case.dimensions.qk_rope_head_dim)
        parts = decode_rows(self.entries, case.cache, float(self.k_scale), *dims, self.dtype)
        return torch.cat(parts, dim=-1).unsqueeze(1).to(self.device)

    @cached_property
    def queries(self) -> torch.Tensor:
        """[T, N, L + R] in the model's dtype, on the device; rows of padding are poison."""
        case, keys = self.case, self.keys.float().cpu()
        q = torch.randn(sum(case.q), case.heads, keys.shape[-1], generator=self.generator)
        for rows, seen in zip(segments(start_loc(case.q)), segments(start_loc(self.totals)), strict=False):
            k = keys[seen].expand(-1, case.heads, -1)
            q[rows] = self.regime.queries(Site(q[rows], k, case.softmax_scale, edges(k.shape[0], case)))
        padding = poison((case.pad, *q.shape[1:]), self.dtype, torch.device("cpu"), case.poison)
        return torch.cat([q.to(self.dtype), padding]).to(self.device)

    @property
    def whole(self) -> Question | None:
        """Attention to the tokens of all ranks; None where there is one."""
        if self.case.ranks == 1:
            return None
        keys, values = self.keys, self.keys[..., : self.case.kv_lora_rank]
        starts = (self.query_start_loc, start_loc(self.totals))
        return Question(self.queries, keys, values, *starts, causal=True, dequantised=self.case.cache != "auto")

    def calls(self) -> tuple[DecodeCall, ...]:
        """One call for each rank."""
        _ = self.entries, self.queries  # drawn in this order, whatever asks first
        operands = lay_out_queries(self.queries, self.case)
        return tuple(self._call(rank, *operands) for rank in range(self.case.ranks))

    def _call(self, rank: int, ql_nope: torch.Tensor, q_pe: torch.Tensor) -> DecodeCall:
        owned = [
            [first + position for position in self._positions(total, rank)]
            for first, total in zip(start_loc(self.totals), self.totals, strict=False)
        ]
        lengths, every = [len(rows) for rows in owned], [row for rows in owned for row in rows]
        pages, keys = write_pages(self.case, self.entries[every], lengths, self.device), self.keys[every]
        return DecodeCall(
            chunk_idx=None,
            q=self.queries,
            k=keys,
            v=keys[..., : self.case.kv_lora_rank],
            key_start_loc=start_loc(lengths),
            ql_nope=ql_nope,
            q_pe=q_pe,
            kv_cache=pages.cache,
            k_scale=self.k_scale,
            metadata=self._metadata(rank, pages.block_table, lengths),
        )

    def _positions(self, total: int, rank: int) -> Sequence[int]:
        if self.case.ranks == 1:
            return range(total)
        return local_positions(total, rank=rank, world_size=self.case.ranks, interleave=self.case.interleave)

    def _metadata(self, rank: int, block_table: torch.Tensor, lengths: Sequence[int]) -> MLACommonDecodeMetadata:
        case, cpu = self.case, torch.device("cpu")

        def int32(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return MLACommonDecodeMetadata(
            block_table=block_table,
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


def lay_out_queries(q: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """ql_nope [T, N, L] and q_pe [T, N, R] in a memory layout; by default that of a model.

    There the first is the transposed result of the product with W_UK, the second a slice of the projected query.
    """
    ql_nope, q_pe = q[..., : case.kv_lora_rank], q[..., case.kv_lora_rank :]
    if case.layout == Layout.KV_B_PROJ:
        wide = poison((*q.shape[:2], case.dimensions.qk_head_dim), q.dtype, q.device, case.poison)
        view = wide[..., case.dimensions.qk_nope_head_dim :]
        return ql_nope.transpose(0, 1).contiguous().transpose(0, 1), view.copy_(q_pe)
    return lay_out("q", ql_nope, ql_nope, case), lay_out("q", q_pe, q_pe, case)
