"""From a case of a cache operation to its calls, one for each rank, and their judge: every byte written (SPEC 9)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from mla_conformance.backends import cache, roles
from mla_conformance.cases.cached import CachedCase
from mla_conformance.judging import golden, record, steps
from mla_conformance.problems import cached_batch, calls, memory, operands
from mla_conformance.problems.written import TIE_SLACK, CacheImage, Latents, WrittenEntries, WrittenRows
from mla_conformance.reference.cache_layout import decode_rows, steady
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.roles.cache.case import COMPUTES, GATHERS, WRITES, CacheCase
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.layer.problem import ASIDE, LatentBatch

SLOT_DTYPES = {"int64": torch.int64, "int32": torch.int32}
_GUARDS, _BEHIND, _FURTHER = 2, 3, 3
"""Blocks of poison beside a cache, rows behind those of a workspace, and entries or blocks that nobody asks for."""
_FILLING = 0x5A  # of numbers before a call, since all bits set would be -1, which is right in some places
_HOLES = 8  # one of so many places in a list is -1, and another one outside where that is asked for

Arguments = tuple[Mapping[str, Any], Mapping[str, CacheImage | WrittenRows]]
"""What a call is given, and what it writes, by the names of its arguments."""


@dataclass(frozen=True, kw_only=True)
class CacheCall(calls.KernelCall):
    """``run_write_latent`` and its siblings; q is [T, 1, L + R] of the model's dtype, k the same, of no token."""

    case: CachedCase
    written: Mapping[str, CacheImage | WrittenRows | WrittenEntries]
    rank: int = 0  # whose call it is

    means: ClassVar = {"q": "T", "k": ""}

    @classmethod
    def of(cls, batch: Any, named: Mapping[str, Any], written: Mapping[str, Any], **further: Any) -> Self:
        counted = operands.start_loc(batch.case.q)
        q, keys = torch.zeros(counted[-1], 1, 1, dtype=batch.dtype, device=batch.device), (0,) * len(counted)
        about: dict[str, Any] = {"query_start_loc": counted, "key_start_loc": keys, "case": batch.case}
        return cls(q=q, k=q[:0], named=named, written=written, **about, **further)

    @property
    def name(self) -> str:
        return f"{super().name} on rank {self.rank}" if self.case.ranks > 1 else super().name

    def regrouped(self, case: Any, requests: Sequence[int], queries: int | None) -> Self:
        """Not here: what a call writes goes by the whole batch."""
        raise operands.ProblemError(f"{case.id}: the requests of a cache operation cannot be regrouped")


class CacheBatch(LatentBatch[CacheCase]):
    def __init__(self, case: CacheCase, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        # Entries of each request on all ranks; some are behind those that a gather asks for.
        self.totals = tuple((q + kv) // case.ratio for q, kv in zip(case.q, case.kv, strict=True))
        if case.call in GATHERS:
            batch = enumerate(zip(case.q, case.kv, strict=True))
            self.totals = tuple(kv // case.ratio + q + index % _FURTHER for index, (q, kv) in batch)

    def settled(self, kv_c: torch.Tensor, k_pe: torch.Tensor) -> Latents:
        """Without largest values on the edge of two scales, either of which a writer may find."""
        form = TILED_FORMATS.get(self.case.cache)
        if form is None or not len(kv_c):
            return kv_c, k_pe
        tiles = kv_c[:, : form.coded].unflatten(1, (form.tiles, form.tile))
        largest = tiles.abs() == tiles.abs().amax(dim=-1, keepdim=True)
        moved = largest & ~steady(kv_c, form, self.case.scales, TIE_SLACK).unsqueeze(-1)
        coded = tiles.where(~moved, tiles * ASIDE).flatten(1)
        return torch.cat((coded, kv_c[:, form.coded :]), dim=1), k_pe

    def calls(self) -> tuple[CacheCall, ...]:
        case = self.case
        computed = self._mapping if case.call == COMPUTES[0] else self._global
        made = self._write if case.call in WRITES else self._gather if case.call in GATHERS else computed
        return tuple(CacheCall.of(self, *made(rank), rank=rank) for rank in range(case.ranks))

    def _pages(self, rows: torch.Tensor, lengths: Sequence[int]) -> cached_batch.Pages:
        padded = (*lengths, *(0,) * self.case.pad)
        return cached_batch.write_pages(self, self.entries[rows], padded, self.case.cache, self.case.page, _GUARDS)

    def _write(self, rank: int) -> Arguments:
        case, (held, stored) = self.case, self.held(rank)
        pages = self._pages(stored, list(map(len, held)))
        image = CacheImage.of(case, pages, self.new_of(held), (self.latents[0][stored], self.latents[1][stored]))
        slots, tokens = torch.full((sum(self.totals),), -1), self.new_of(map(torch.arange, self.totals))
        slots[stored] = pages.slots
        mapped = torch.cat((slots[tokens], torch.full((case.pad,), -1))).to(SLOT_DTYPES[case.slots])
        kv_c, k_pe = operands.sliced([self.beside_poison(x[tokens], 2 * case.pad) for x in self.latents], case)
        given = {"k": kv_c} if case.call == WRITES[1] else {"kv_c": kv_c, "k_pe": k_pe, "k_scale": self.k_scale}
        return {**given, "slot_mapping": mapped.to(self.device)}, {"kv_cache": image}

    def _gather(self, rank: int) -> Arguments:
        case, starts = self.case, operands.start_loc(self.totals)
        pages = self._pages(torch.arange(starts[-1]), self.totals)
        firsts = [start + kv // case.ratio for start, kv in zip(starts, case.kv, strict=False)]
        rows = torch.cat([torch.arange(first, first + q) for first, q in zip(firsts, case.q, strict=True)])
        padding = (0,) * case.pad
        given = {
            "kv_cache": pages.cache,
            "block_table": pages.block_table,
            "cu_seq_lens": cached_batch.int32(operands.start_loc((*case.q, *padding)), self.device),
            "seq_starts": cached_batch.int32((*case.kv, *padding), self.device),
            **({"k_scale": self.k_scale} if case.call == GATHERS[0] else {}),
            "compress_ratio": case.ratio,
        }
        entries = self.entries[rows]
        if case.call == GATHERS[1]:
            codes, scales = (part.contiguous() for part in entries.tensor_split([case.kv_lora_rank], dim=1))
            stored = {"k": codes.view(torch.float8_e4m3fn), "k_scale": scales.view(torch.float32)[:, 0]}
            return given, {name: self._rows(name, x, x) for name, x in stored.items()}
        if not case.dequantise:
            return given, {"workspace": self._rows("workspace", entries, entries)}
        meant = torch.cat(decode_rows(entries, case.cache, float(self.k_scale), *case.latent_dims, self.dtype), dim=-1)
        slack = meant.abs() * TIE_SLACK
        low, high = (meant - slack).to(self.dtype), (meant + slack).to(self.dtype)
        return given, {"workspace": self._rows("workspace", low, high)}

    def _rows(self, name: str, low: torch.Tensor, high: torch.Tensor, behind: int = _BEHIND) -> WrittenRows:
        low, high, shape = low.to(self.device), high.to(self.device), (len(low) + behind, *low.shape[1:])
        guarded = memory.Guarded.allocate(shape, low.dtype, low.device)
        if low.dtype.is_floating_point:
            guarded.view.copy_(memory.poison(shape, low.dtype, low.device, self.case.poison))
        else:
            guarded.view.view(torch.uint8).fill_(_FILLING)
        return WrittenRows(guarded.view, guarded.storage.clone(), name, low, high, operands.start_loc(self.case.q))

    def _table(self, held: list[torch.Tensor]) -> torch.Tensor:
        """Its blocks may have any number, since no cache is there."""
        case, counts = self.case, [-(-len(own) // self.case.page) for own in held]
        order = torch.randperm(sum(counts) + _FURTHER, generator=self.drawing(case.seed)) + 1 + case.spare
        return cached_batch.block_table_of(case, torch.tensor(counts + [0] * case.pad), order)

    def _mapping(self, rank: int) -> Arguments:
        case, slots, held = self.case, [], self.held(rank)[0]
        table = self._table(held)
        for q, kv, own, blocks in zip(case.q, case.kv, held, table.long(), strict=False):
            of_entries = torch.full((q + kv,), -1)
            at = torch.arange(len(own))
            of_entries[own * case.ratio + case.ratio - 1] = blocks[at // case.page] * case.page + at % case.page
            slots.append(of_entries[kv:])
        right = torch.cat((*slots, torch.full((case.pad + _BEHIND,), -1))).to(SLOT_DTYPES[case.slots]).to(self.device)
        positions = [torch.arange(kv, kv + q) for q, kv in zip(case.q, case.kv, strict=True)]
        given = {
            "query_start_loc": cached_batch.int32(operands.start_loc((*case.q, *(0,) * case.pad)), self.device),
            "positions": torch.cat((*positions, torch.full((case.pad,), 2**40))).to(self.device),
            "block_table": table.to(self.device),
            "block_size": case.page,
            "compress_ratio": case.ratio,
            "dcp_world_size": case.ranks,
            "dcp_rank": rank,
            "cp_kv_cache_interleave_size": case.interleave,
        }
        return given, {"slot_mapping": self._rows("slot_mapping", right, right, behind=0)}

    def _global(self, rank: int) -> Arguments:
        case, table = self.case, self._table(self.held(rank)[0])
        request = torch.arange(len(case.q)).repeat_interleave(torch.tensor(case.q))
        listed = torch.full((len(request) + case.pad, case.topk), -1)
        for row, own in enumerate(request.tolist()):
            drawn = torch.randint(self.totals[own], (case.topk,), generator=self.generator)
            near = torch.tensor(operands.edges(self.totals[own], case)[: case.topk // 2], dtype=torch.int64)
            listed[row] = torch.cat((near, drawn[len(near) :]))
        request = torch.cat((request, torch.zeros(case.pad, dtype=torch.int64)))
        column = (listed // case.page).clamp(min=0)
        slots = table.long()[request.unsqueeze(1), column] * case.page + listed % case.page
        place = torch.rand(listed.shape, generator=self.generator) * _HOLES
        listed[place < 1] = -1
        if case.outside:
            listed[place > _HOLES - 1] = table.shape[1] * case.page + listed[place > _HOLES - 1].abs()
        named = (listed >= 0) & (listed < table.shape[1] * case.page)
        right = slots.where(named, -1).int()
        given = {
            "req_id_per_token": request.int().to(self.device),
            "block_table": table.to(self.device),
            "token_indices": listed.int().to(self.device),
            "block_size": case.page,
        }
        return given, {"out": self._rows("out", right, right, behind=0)}


def golden_bytes(problem: calls.Problem) -> golden.Golden:
    """Every row is judged; what is expected stands in the problem's own images."""
    return golden.Golden(golden.JudgedRows(problem.query_start_loc))


class CacheJudge(steps.Steps):
    writes: ClassVar = record.Check.WRITTEN


CACHE = RoleDefinition(
    role=roles.Role.CACHE,
    batch=CacheBatch,
    config=cache.MLACacheSelectorConfig,
    constructed=("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dtype", "tile_scales"),
    facts=lambda case, dtype: {"slot_dtype": SLOT_DTYPES[case.slots]},
    golden=golden_bytes,
    judge=CacheJudge,
)
