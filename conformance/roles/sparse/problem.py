"""From a sparse case to calls: entries in a paged cache or gathered, on one rank or on several, queries and lists."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from mla_conformance.backends import roles, sparse
from mla_conformance.cases.grammar import Data
from mla_conformance.problems import cached_batch, calls, memory
from mla_conformance.problems.operands import COUNTER_SEEDS, fill_normal, lay_out, start_loc
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.definition import KERNEL_SIZES, RoleDefinition
from mla_conformance.roles.sparse.case import SparseCase


@dataclass(frozen=True, kw_only=True)
class SparseCall(calls.AttentionCall):
    """``run_sparse_decode`` or ``run_sparse_prefill``; k and v are what the keys of both caches mean, float64."""

    slots: torch.Tensor  # [S] int64, where the key of each token stands
    metadata: sparse.MLASparseMetadata
    case: SparseCase

    interface: ClassVar = sparse.MLASparseBackend
    means: ClassVar = {"q": "T", "k": "", "v": "", "selected": "T", "slots": ""}  # lists name keys by number: all stay
    called: ClassVar = {"q": "query", "kv": "kv_cache"}

    @property
    def stored(self) -> torch.Tensor:  # the cache [blocks, page, width], or gathered keys [S, 1, D]
        found: torch.Tensor = self.given["kv_cache" if self.case.is_paged else "kv"]
        return found

    def invoke(self, backend: sparse.MLASparseBackend, out: memory.Guarded | None) -> Any:
        """Gathered keys are plain: a prefill takes no scale of codes."""
        given = {name: x for name, x in self.given.items() if self.case.is_paged or name != "k_scale"}
        return super(SparseCall, replace(self, given=given)).invoke(backend, out)

    def operands(self) -> calls.AttentionOperands:
        return self.attended(causal=False, sink=self.named["attn_sink"])


_HUGE = 2**31 - 1
_ROUND = 7  # of so many rows with lists of drawn lengths, one names no key, one a single key and one as many as it can


@dataclass(frozen=True)
class Lists:
    keys: torch.Tensor  # [T, K] int64 numbers of keys, or -1
    length: torch.Tensor  # [T] int64, columns up to the last key that is named

    def renumbered(self, numbers: torch.Tensor) -> "Lists":
        """The same lists where key k has the number ``numbers[k]``; -1 for one that is not there."""
        there, keys = self.keys != NO_KEY, torch.full_like(self.keys, NO_KEY)
        keys[there] = numbers[self.keys[there]]  # a rank may have no keys at all
        return replace(self, keys=keys)

    def handed(self, numbers: torch.Tensor, behind: str, generator: torch.Generator) -> torch.Tensor:
        """[T, K] int32 with these numbers for the named keys; from the length on as ``behind`` says."""
        filling = torch.full_like(numbers, {"minus": NO_KEY, "zero": 0, "huge": _HUGE}.get(behind, NO_KEY))
        used = numbers[numbers != NO_KEY]
        if behind == "stale" and len(used):
            filling = used[torch.randint(len(used), numbers.shape, generator=generator)]
        counted = torch.arange(self.keys.shape[1]) < self.length.unsqueeze(1)
        return torch.where(counted, numbers, filling).int()


def draw_lists(
    case: SparseCase, firsts: torch.Tensor, bounds: torch.Tensor, columns: int, generator: torch.Generator
) -> Lists:
    """Lists of so many columns, as the case says, of rows that may name ``bounds`` [T] keys from ``firsts`` [T] on."""
    column, most = torch.arange(columns), bounds.clamp(max=columns)
    counts = (torch.rand(len(most), generator=generator) * (most + 1)).long()  # keys that each list names
    row = torch.arange(len(most)) % _ROUND
    counts = torch.where(row == 1, most, counts)
    counts = torch.where(row == 2, 0, torch.where(row == 4, most.clamp(max=1), counts))
    counts = (most if case.fill == "full" else counts).unsqueeze(1)
    # Different numbers below each row's bound in drawn order, of equal parts: no draw is as wide.
    parts, end = bounds.clamp(1, columns).unsqueeze(1), bounds.unsqueeze(1)
    least, behind = column * end // parts, (column + 1) * end // parts
    numbers = least + (torch.rand(len(bounds), columns, generator=generator) * (behind - least)).long()
    turn = torch.rand(len(bounds), columns, generator=generator).masked_fill(column >= parts, 2.0).argsort(dim=1)
    chosen = numbers.gather(1, turn)
    if case.repeats:  # the last quarter of each list's keys are its first ones
        first = counts - counts // 4
        chosen = chosen.gather(1, torch.where(column >= first, column - first, column).clamp(max=columns - 1))
    chosen = chosen + firsts.unsqueeze(1)
    if case.order != "drawn":  # of the named ones, which stand first
        descending = case.order == "descending"
        behind = chosen.masked_fill(column >= counts, -1 if descending else torch.iinfo(torch.int64).max)
        chosen = behind.sort(dim=1, descending=descending).values
    place = column.expand(len(bounds), columns)
    if case.holes == "scattered":
        place = torch.rand(place.shape, generator=generator).argsort(dim=1).argsort(dim=1)
    held = place >= columns - counts if case.holes == "front" else place < counts
    # The n-th column that holds a key holds the n-th of them.
    keys = torch.where(held, chosen.gather(1, (held.cumsum(1) - 1).clamp(min=0)), NO_KEY)
    return Lists(keys, torch.where(held, column + 1, 0).amax(dim=1))


_LISTS_SEED = 10**6
_SINK_SPREAD = 3.0
_GUARDS = 1  # blocks, or gathered rows, on either side of those that numbers name: -1 as an address leads to poison
_COUNTED_ELEMENTS = 2**28  # elements of the queries from which they are drawn on the device


@dataclass(frozen=True)
class _Source:
    lengths: Sequence[int]  # keys of each request
    entries: torch.Tensor  # [S, width] on the CPU; what no list names is poison if the case says so
    keys: torch.Tensor  # [S, 1, D] float64 on the device, what they mean
    lists: Lists  # numbers of these keys


class SparseBatch(cached_batch.CachedBatch[SparseCase]):
    extra: _Source | None

    def __init__(self, case: SparseCase, device: torch.device, salt: str = "") -> None:
        super().__init__(case, device, salt)
        # What lists and sinks are drawn with: other lists of the same keys leave the keys as they are.
        self._drawing = self.drawing(_LISTS_SEED + case.seed)
        # The tokens of the batch: a row may name those up to its own.
        rows = [
            (first, total - queries + row + 1 if total else 0)
            for first, total, queries in zip(start_loc(self.totals), self.totals, self.query_lens, strict=False)
            for row in range(queries)
        ]
        firsts, bounds = torch.tensor(rows, dtype=torch.int64).unbind(1)
        lists = draw_lists(case, firsts, bounds, case.topk, self._drawing)
        self.main = self._source(self.totals, self.entries, lists, case.cache)
        # [S + S', 1, D] float64: the tokens, and behind them the entries of a second cache, all of which is before the
        # rows; and of these keys [T, K + K'] int64 numbers, or -1.
        self.keys, self.extra = self.main.keys, None
        if case.has_extra:
            lengths, per_row = (*case.extra_lens, *(0,) * case.pad), torch.tensor(self.query_lens)
            firsts, bounds = (torch.tensor(x).repeat_interleave(per_row) for x in (start_loc(lengths)[:-1], lengths))
            lists = draw_lists(case, firsts, bounds, case.extra_topk, self._drawing)
            self.extra = self._source(lengths, self.draw_entries(lengths, case.extra), lists, case.extra)
            self.keys = torch.cat((self.keys, self.extra.keys))
        self.selected = self._joined(self.main.lists, len(self.main.keys))

    def _source(self, lengths: Sequence[int], entries: torch.Tensor, lists: Lists, layout: str) -> _Source:
        if self.case.unselected == "poison":
            left = torch.ones(len(entries), dtype=torch.bool)
            left[lists.keys[lists.keys != NO_KEY]] = False
            hole = memory.poison(entries[left].shape, entries.dtype, entries.device, self.case.poison)
            entries.view(torch.uint8)[left] = hole.view(torch.uint8)
        return _Source(lengths, entries, self.meaning(entries, layout), lists)

    @cached_property
    def queries(self) -> torch.Tensor:
        """[T, N, D] in the model's dtype, on the device; to a data regime the keys of a row are those of its list."""
        case = self.case
        shape = (sum(case.q), case.heads, self.main.keys.shape[-1])
        if case.data == Data.NORMAL and math.prod(shape) >= _COUNTED_ELEMENTS:
            seed = self.drawing(case.seed).initial_seed() % COUNTER_SEEDS
            return self.padded(fill_normal(torch.empty(shape, dtype=self.dtype, device=self.device), seed))
        q = torch.randn(*shape, generator=self.generator)

        def keys() -> Iterator[torch.Tensor]:
            every = self.keys.float().cpu().expand(-1, case.heads, -1)
            return (every[named[named != NO_KEY]] for named in self.selected[: len(q)])

        return self.padded(self.queries_of(q, keys, causal=False, each=True).to(self.dtype).to(self.device))

    def _joined(self, lists: Lists, keys: int) -> torch.Tensor:
        """Lists of so many keys, and those of the second cache, whose keys stand behind them."""
        if self.extra is None:
            return lists.keys
        behind = self.extra.lists.keys
        return torch.cat((lists.keys, torch.where(behind == NO_KEY, NO_KEY, behind + keys)), dim=1)

    @cached_property
    def sink(self) -> torch.Tensor | None:  # [N] float32; infinite ones among them if the case says so
        if self.case.sink == "none":
            return None
        drawn = torch.randn(self.case.heads, generator=self._drawing) * _SINK_SPREAD
        sink = drawn + torch.tensor(float(self.case.topk)).log()
        if self.case.sink == "extreme":
            head = torch.arange(self.case.heads) % 4
            sink = sink.masked_fill(head == 1, -torch.inf).masked_fill(head == 3, torch.inf)
        return sink.to(self.device)

    @property
    def whole(self) -> calls.AttentionOperands | None:
        whole = super().whole
        return whole and replace(whole, causal=False, selected=self.selected.to(self.device))

    def calls(self) -> tuple[SparseCall, ...]:
        query = lay_out("q", self.queries, self.queries, self.case)  # drawn behind the entries of both caches
        return tuple(self._call(rank, query) for rank in range(self.case.ranks))

    def _call(self, rank: int, query: torch.Tensor) -> SparseCall:
        case, extra = self.case, self.extra
        held, every = self.held(rank)
        lengths = list(map(len, held))
        numbers = torch.full((len(self.entries),), NO_KEY)
        numbers[every] = torch.arange(len(every))
        lists, keys = self.main.lists.renumbered(numbers), self.main.keys[every]
        if case.is_paged:
            pages = cached_batch.write_pages(self, self.entries[every], lengths, case.cache, case.page, _GUARDS)
        else:
            pages = cached_batch.gather_entries(case, self.entries[every], lengths, self.device, _GUARDS)
        if extra is not None:
            keys = torch.cat((keys, extra.keys))
        # What stands for each key: a rank is handed the positions that all others are, and finds its own.
        if case.space == roles.IndexSpace.SLOT:
            named = self._lists(lists, lists.renumbered(pages.slots).keys)
        else:
            on_all = case.space == roles.IndexSpace.POSITION
            listed, starts = (self.main.lists, self.totals) if on_all else (lists, lengths)
            first = torch.tensor(start_loc(starts))[:-1].repeat_interleave(torch.tensor(self.query_lens)).unsqueeze(1)
            named = self._lists(lists, torch.where(listed.keys == NO_KEY, NO_KEY, listed.keys - first))
        named |= {"return_softmax_lse": case.lse, "attn_sink": self.sink}
        if extra is not None:
            second = cached_batch.write_pages(self, extra.entries, extra.lengths, case.extra, case.extra_page, _GUARDS)
            named["extra_kv_cache"] = second.cache
            named |= self._lists(extra.lists, extra.lists.renumbered(second.slots).keys, "extra_")
        told = self.metadata(lengths, rank)
        return SparseCall(
            **self.attended(keys, lengths),
            given={"q": query, "kv_cache" if case.is_paged else "kv": pages.cache, "k_scale": self.k_scale},
            named=named,
            selected=self._joined(lists, len(every)).to(self.device),
            slots=pages.slots,
            metadata=cached_batch.list_metadata(told, pages.block_table, case.space, paged=case.is_paged),
            case=case,
        )

    def _lists(self, lists: Lists, numbers: torch.Tensor, prefix: str = "") -> dict[str, Any]:
        handed = lists.handed(numbers, self.case.behind, self._drawing).to(self.device)
        length = lists.length.int().to(self.device) if self.case.length else None
        return {f"{prefix}topk_indices": handed, f"{prefix}topk_length": length}


SPARSE = RoleDefinition(
    role=roles.Role.SPARSE,
    batch=SparseBatch,
    config=sparse.MLASparseSelectorConfig,
    constructed=(*KERNEL_SIZES, "kv_cache_dtype", "extra_kv_cache_dtype"),
    facts=lambda case, dtype: {
        "call": "decode" if case.is_paged else "prefill",
        "block_size": case.page if case.is_paged else 1,
        "sink": case.sink != "none",
        "extra_kv_cache_dtype": case.extra if case.has_extra else None,
        "extra_block_size": case.extra_page if case.has_extra else 0,
        "extra_topk": case.extra_topk if case.has_extra else 0,
    },
)
