"""From a sparse case to calls: entries in a paged cache or gathered, on one rank or on several, queries and lists."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from mla_conformance.backends.roles import IndexSpace, Role
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.cases.grammar import Data
from mla_conformance.problems.cached_batch import (
    CachedBatch,
    PageForm,
    Pages,
    gather_entries,
    sparse_metadata,
    write_pages,
)
from mla_conformance.problems.calls import AttentionOperands
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import COUNTER_SEEDS, Site, edges, fill_normal, lay_out, start_loc
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.definition import KERNEL_SIZES, RoleDefinition
from mla_conformance.roles.sparse.call import SparseCall
from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.sparse.selection import Lists, draw_lists

_LISTS_SEED = 10**6
_SINK_SPREAD = 3.0
_GUARDS = 1
"""Blocks, or gathered rows, on either side of those that numbers name: -1 as an address leads to poison."""
_COUNTED_ELEMENTS = 2**28
"""Elements of the queries from which they are drawn on the device."""


@dataclass(frozen=True)
class _Source:
    """Keys and the lists over them."""

    lengths: Sequence[int]  # keys of each request
    entries: torch.Tensor  # [S, width] on the CPU; what no list names is poison if the case says so
    keys: torch.Tensor  # [S, 1, D] float64 on the device, what they mean
    lists: Lists  # numbers of these keys


class SparseBatch(CachedBatch[SparseCase]):
    """The batch of a sparse case, before and after its tokens are dealt out to ranks."""

    @cached_property
    def _drawing(self) -> torch.Generator:
        """What lists and sinks are drawn with: other lists of the same keys leave the keys as they are."""
        return self.drawing(_LISTS_SEED + self.case.seed)

    @cached_property
    def main(self) -> _Source:
        """The tokens of the batch: a row may name those up to its own."""
        case = self.case
        firsts = start_loc(self.totals)
        rows = [
            (first, total - queries + row + 1 if total else 0)
            for first, total, queries in zip(firsts, self.totals, self.query_lens, strict=False)
            for row in range(queries)
        ]
        numbers = torch.tensor(rows, dtype=torch.int64)
        lists = draw_lists(case, numbers[:, 0], numbers[:, 1], case.topk, self._drawing)
        return self._source(self.totals, self.entries, lists, case.cache)

    @cached_property
    def extra(self) -> _Source | None:
        """The second cache, all of which is before the rows."""
        if not self.case.has_extra:
            return None
        lengths = (*self.case.extra_lens, *(0,) * self.case.pad)
        firsts, per_row = torch.tensor(start_loc(lengths))[:-1], torch.tensor(self.query_lens)
        bounds = torch.tensor(lengths).repeat_interleave(per_row)
        columns = self.case.extra_topk
        lists = draw_lists(self.case, firsts.repeat_interleave(per_row), bounds, columns, self._drawing)
        return self._source(lengths, self.draw_entries(lengths, self.case.extra), lists, self.case.extra)

    def _source(self, lengths: Sequence[int], entries: torch.Tensor, lists: Lists, layout: str) -> _Source:
        if self.case.unselected == "poison":
            left = ~lists.named(len(entries))
            hole = poison(entries[left].shape, entries.dtype, entries.device, self.case.poison)
            entries.view(torch.uint8)[left] = hole.view(torch.uint8)
        return _Source(lengths, entries, self.meaning(entries, layout), lists)

    @cached_property
    def queries(self) -> torch.Tensor:
        """[T, N, D] in the model's dtype, on the device; to a data regime the keys of a row are those of its list."""
        case = self.case
        shape = (sum(case.q), case.heads, self.main.keys.shape[-1])
        if case.data == Data.NORMAL:
            return self.padded(self._normal(shape))
        q = torch.randn(*shape, generator=self.generator)
        q = self.queries_of(q, lambda: self._sites(q))
        return self.padded(q.to(self.dtype).to(self.device))

    def _sites(self, q: torch.Tensor) -> Iterator[tuple[slice, Site]]:
        case, keys = self.case, self.keys.float().cpu()
        for row in range(len(q)):
            named = self.selected[row][self.selected[row] != NO_KEY]
            k, own = keys[named].expand(-1, case.heads, -1), slice(row, row + 1)
            yield own, Site(q[own], k, case.softmax_scale, edges(len(named), case))

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Queries that know no keys; many of them are drawn where they are used, by counters."""
        if math.prod(shape) < _COUNTED_ELEMENTS:
            return torch.randn(*shape, generator=self.generator).to(self.dtype).to(self.device)
        seed = self.drawing(self.case.seed).initial_seed() % COUNTER_SEEDS
        return fill_normal(torch.empty(shape, dtype=self.dtype, device=self.device), seed)

    @cached_property
    def keys(self) -> torch.Tensor:
        """[S + S', 1, D] float64: the tokens, and behind them the entries of a second cache."""
        return self.main.keys if self.extra is None else torch.cat((self.main.keys, self.extra.keys))

    @cached_property
    def selected(self) -> torch.Tensor:
        """[T, K + K'] int64 numbers of keys, or -1."""
        return self._joined(self.main.lists, len(self.main.keys))

    def _joined(self, lists: Lists, keys: int) -> torch.Tensor:
        """Lists of so many keys, and those of the second cache, whose keys stand behind them."""
        if self.extra is None:
            return lists.keys
        behind = self.extra.lists.keys
        return torch.cat((lists.keys, torch.where(behind == NO_KEY, NO_KEY, behind + keys)), dim=1)

    @cached_property
    def sink(self) -> torch.Tensor | None:
        """[N] float32; infinite ones among them if the case says so."""
        if self.case.sink == "none":
            return None
        drawn = torch.randn(self.case.heads, generator=self._drawing) * _SINK_SPREAD
        sink = drawn + torch.tensor(float(self.case.topk)).log()
        if self.case.sink == "extreme":
            head = torch.arange(self.case.heads) % 4
            sink = sink.masked_fill(head == 1, -torch.inf).masked_fill(head == 3, torch.inf)
        return sink.to(self.device)

    @property
    def whole(self) -> AttentionOperands | None:
        if not self.case.is_merged:
            return None
        starts = (self.query_start_loc, start_loc(self.totals))
        values, selected = self.keys[..., : self.case.kv_lora_rank], self.selected.to(self.device)
        codes = self.case.holds_codes
        return AttentionOperands(self.queries, self.keys, values, *starts, False, dequantised=codes, selected=selected)

    def calls(self) -> tuple[SparseCall, ...]:
        _ = self.main, self.extra, self.queries  # drawn in this order, whatever asks first
        query = lay_out("q", self.queries, self.queries, self.case)
        return tuple(self._call(rank, query) for rank in range(self.case.ranks))

    def _call(self, rank: int, query: torch.Tensor) -> SparseCall:
        held, every = self.held(rank)
        lengths = list(map(len, held))
        numbers = torch.full((len(self.entries),), NO_KEY)
        numbers[every] = torch.arange(len(every))
        lists, keys = self.main.lists.renumbered(numbers), self.main.keys[every]
        entries = self.main.entries[every]
        if self.case.is_paged:
            pages = write_pages(self, PageForm(self.case.cache, self.case.page, _GUARDS), entries, lengths)
        else:
            pages = gather_entries(self.case, entries, lengths, self.device, _GUARDS)
        if self.extra is not None:
            keys = torch.cat((keys, self.extra.keys))
        return SparseCall(
            q=self.queries,
            k=keys,
            v=keys[..., : self.case.kv_lora_rank],
            query_start_loc=self.query_start_loc,
            key_start_loc=start_loc(lengths),
            given={"q": query, "kv_cache" if self.case.is_paged else "kv": pages.cache, "k_scale": self.k_scale},
            named={
                **self._lists(lists, self._numbers(rank, lists, lengths, pages)),
                "return_softmax_lse": self.case.lse,
                "attn_sink": self.sink,
                **self._extra_operands(),
            },
            selected=self._joined(lists, len(every)).to(self.device),
            slots=pages.slots,
            metadata=sparse_metadata(self, pages, lengths, paged=self.case.is_paged, space=self.case.space, rank=rank),
            case=self.case,
        )

    def _numbers(self, rank: int, lists: Lists, lengths: Sequence[int], pages: Pages) -> torch.Tensor:
        """[T, K] int64: what stands for each key of a rank's lists, in the case's index space."""
        firsts = start_loc(self.totals if self.case.space == IndexSpace.POSITION else lengths)
        first = torch.tensor(firsts)[:-1].repeat_interleave(torch.tensor(self.query_lens)).unsqueeze(1)
        if self.case.space == IndexSpace.POSITION:
            # A rank is handed what all others are, and finds its own.
            return torch.where(self.main.lists.keys == NO_KEY, NO_KEY, self.main.lists.keys - first)
        if self.case.space == IndexSpace.RANK_LOCAL:
            return torch.where(lists.keys == NO_KEY, NO_KEY, lists.keys - first)
        return lists.renumbered(pages.slots).keys

    def _lists(self, lists: Lists, numbers: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor | None]:
        """Lists as they are handed over, and their lengths if the case has them."""
        handed = lists.handed(numbers, self.case.behind, self._drawing).to(self.device)
        length = lists.length.int().to(self.device) if self.case.length else None
        return {f"{prefix}topk_indices": handed, f"{prefix}topk_length": length}

    def _extra_operands(self) -> dict[str, torch.Tensor | None]:
        if self.extra is None:
            return {}
        form = PageForm(self.case.extra, self.case.extra_page, _GUARDS)
        pages = write_pages(self, form, self.extra.entries, self.extra.lengths)
        lists = self.extra.lists
        return {"extra_kv_cache": pages.cache, **self._lists(lists, lists.renumbered(pages.slots).keys, "extra_")}


SPARSE = RoleDefinition(
    role=Role.SPARSE,
    batch=SparseBatch,
    config=MLASparseSelectorConfig,
    constructed=(*KERNEL_SIZES, "kv_cache_dtype", "extra_kv_cache_dtype"),
    facts=lambda case, dtype: {
        "call": "decode" if case.is_paged else "prefill",
        "block_size": case.page if case.is_paged else 1,
        "topk": case.topk,
        "index_space": case.space,
        "topk_length": case.length,
        "sink": case.sink != "none",
        "duplicates": case.repeats,
        "extra_kv_cache_dtype": case.extra if case.has_extra else None,
        "extra_block_size": case.extra_page if case.has_extra else 0,
        "extra_topk": case.extra_topk if case.has_extra else 0,
    },
)
