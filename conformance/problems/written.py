"""Memory of the caller that calls write: what was there, what must be there afterwards, and what differs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.cached_batch import Pages
from mla_conformance.problems.memory import Written, differing, over, poison, storage_bytes
from mla_conformance.reference import cache_layout, selected

TIE_SLACK = 2.0**-20
"""Relative slack of a stored code: a kernel divides by the scale in float32, and may meet the other side of a tie."""


Latents = tuple[torch.Tensor, torch.Tensor]  # kv_c [n, L] and k_pe [n, R], of all tokens of a batch or of some


@dataclass(frozen=True)
class CacheImage(Written):
    case: CachedCase  # for layout and scale
    after: torch.Tensor  # the bytes that must be there after the call
    slots: torch.Tensor  # [T] slots that the call writes, flat numbers block · page + offset
    latents: Latents  # kv_c [T, L] and k_pe [T, R] that belong there, in the model's dtype

    expected: ClassVar = ("after", "latents")

    @staticmethod
    def of(case: CachedCase, pages: Pages, new: torch.Tensor, latents: Latents) -> "CacheImage":
        """A cache that holds all tokens of a batch on one rank, those among them that are ``new`` [S] not yet."""
        cache, after = pages.cache, storage_bytes(pages.cache).clone()
        rows = new.nonzero().flatten()
        slots = pages.slots[rows].to(cache.device)
        holes = poison((len(slots), cache.shape[2]), cache.dtype, cache.device, case.poison)
        cache_layout.write_entries(cache, holes, slots, case.cache)
        return CacheImage(cache, storage_bytes(cache).clone(), case, after, slots, (latents[0][rows], latents[1][rows]))

    def with_only(self, rows: torch.Tensor, starts: Sequence[int] = ()) -> "CacheImage":
        """The same cache before a call that writes only these [n] of the new tokens, wherever requests begin."""
        slots = self.slots[rows.to(self.slots.device)]
        after = self.before.clone()
        rows_after = cache_layout.read_entries(self._view(self.after), slots, self.case.cache)
        cache_layout.write_entries(self._view(after), rows_after, slots, self.case.cache)
        return replace(self, after=after, slots=slots, latents=(self.latents[0][rows], self.latents[1][rows]))

    def difference(self) -> str:
        found = storage_bytes(self.cache)
        if not any(differing([(found, self.after)])):
            return ""
        wrong = found != self.after
        every = torch.arange(self.cache.shape[0] * self.cache.shape[1], device=wrong.device)
        found = cache_layout.read_entries(self._view(wrong.to(torch.uint8)), every, self.case.cache).bool()
        if found.sum() < wrong.sum():
            return "bytes of the cache's buffer were written that are not this layer's"
        slots = every[found.any(dim=1)]
        written = torch.isin(slots, self.slots)
        if not bool(written.all()):
            return f"slot {int(slots[~written][0])} of the cache was written, no new token belongs there"
        # Of entries that differ in their bytes, whether they differ in what they mean.
        if not self.case.holds_codes:
            return f"the entry of slot {int(slots[0])} of the cache is not the new token's"
        codes = (self.case.cache, self.case.cache_scale, *self.case.latent_dims, self.latents[0].dtype)
        own = torch.isin(self.slots, slots)
        chosen, given = self.slots[own], [x[own.cpu()].double() for x in self.latents]
        views = map(self._view, (self.after, storage_bytes(self.cache)))
        read = (cache_layout.read_entries(x, chosen, self.case.cache).view(self.cache.dtype) for x in views)
        expected, stored = (cache_layout.decode_rows(entries, *codes) for entries in read)
        names = ("latent" if self.case.latent_dims[1] else "key", "rope key")
        for name, x, right, got in zip(names, given, expected, stored, strict=True):
            allowed = (right.cpu() - x).abs() + TIE_SLACK * x.abs()
            off = ~((got.cpu() - x).abs() <= allowed)
            if bool(off.any()):
                row = int(off.any(dim=1).nonzero()[0])
                return f"the {name} in slot {int(chosen[row])} of the cache is not the code nearest to the new token's"
        return ""

    def _view(self, storage: torch.Tensor) -> torch.Tensor:
        """[blocks, page, bytes of an entry] of bytes laid out as the cache is, in place."""
        return over(storage.untyped_storage(), self.cache).view(torch.uint8)


@dataclass(frozen=True)
class WrittenRows(Written):
    name: str  # how messages call it
    low: torch.Tensor  # [n, …] the least that the first n rows may hold, in its dtype
    high: torch.Tensor  # [n, …] the most
    starts: tuple[int, ...]  # first row of each request, and n

    expected: ClassVar = ("low", "high")

    def difference(self) -> str:
        row = self.cache[:1].numel() * self.cache.element_size()
        start = self.cache.storage_offset() * self.cache.element_size()
        changed = storage_bytes(self.cache) != self.before
        changed[start : start + len(self.low) * row] = False
        if bool(changed.any()):
            number = (int(changed.nonzero()[0]) - start) // max(1, row)
            if 0 <= number < len(self.cache):
                return f"row {number} of {self.name} was written, only {len(self.low)} are asked for"
            return f"bytes beside {self.name} were written"
        compared = (self.cache[: len(self.low)], self.low, self.high)  # codes by their bytes, which alone can be right
        got, low, high = (x.view(torch.uint8) if x.element_size() == 1 else x for x in compared)
        wrong = ~((got >= low) & (got <= high))
        if not bool(wrong.any()):
            return ""
        place = wrong.nonzero()[0]
        row, *column = place.tolist()
        found, right = (x[tuple(place)].item() for x in (got, low))
        request = next((n for n, (a, b) in enumerate(pairwise(self.starts)) if a <= row < b), None)
        token = "padding" if request is None else f"number {row - self.starts[request]} of request {request}"
        where = f"row {row} of {self.name} ({token})" + (f", column {column[0]}," if column else "")
        return f"{where} is {found:.6g}, expected {right:.6g}; {int(wrong.sum())} of {wrong.numel()} are wrong"


@dataclass(frozen=True)
class WrittenEntries(Written):
    name: str  # how messages call it
    slots: torch.Tensor  # [n] int64 slots that calls may write, block · page + offset
    starts: tuple[int, ...] = ()  # first of them of each request, and n; empty where entries are not told apart
    # the least and the most [n, width] that stands there afterwards, in its dtype; None where that is free
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None

    expected: ClassVar = ("bounds",)

    @staticmethod
    def of(
        name: str, cache: torch.Tensor, slots: torch.Tensor, starts: tuple[int, ...] = (), *bounds: torch.Tensor
    ) -> "WrittenEntries":
        on = cache.device
        low_high = (bounds[0].to(on), bounds[1].to(on)) if bounds else None
        return WrittenEntries(cache, storage_bytes(cache).clone(), name, slots.to(on), starts, low_high)

    def difference(self) -> str:
        changed, page = storage_bytes(self.cache) != self.before, self.cache.shape[1]
        rows = over(changed.untyped_storage(), self.cache).view(torch.uint8)  # the bytes of entries, in place
        places = self.slots // page, self.slots % page
        rows[places] = 0
        if bool(changed.any()):
            slots = rows.any(dim=2).flatten().nonzero()
            if not len(slots):
                return f"bytes of the buffer of {self.name} were written that are not this layer's"
            return f"slot {int(slots[0])} of {self.name} was written, nothing belongs there"
        if self.bounds is None:
            return ""
        got, (low, high) = self.cache[places], self.bounds
        wrong = ~((got >= low) & (got <= high))
        if not bool(wrong.any()):
            return ""
        row, column = wrong.nonzero()[0].tolist()
        request = next(number for number, end in enumerate(self.starts[1:]) if row < end)
        found, least, most = (float(x[row, column]) for x in (got, low, high))
        return (
            f"entry {row - self.starts[request]} of request {request}, in slot {int(self.slots[row])} of {self.name}, "
            f"is {found:.6g} in column {column}, expected {least:.6g} to {most:.6g}; "
            f"{int(wrong.any(dim=1).sum())} of {len(wrong)} entries are wrong"
        )


@dataclass(frozen=True)
class SelectedLists(Written):
    """A buffer [T or more, K] int32 of selected tokens, which layers behind the one that writes it read."""

    lists: torch.Tensor  # [n, K] int32, what the first n rows must name, in any order
    free: torch.Tensor  # [n] bool, rows that no layer need read
    padding: int  # rows behind them that may hold anything
    kept: bool  # whether the layer may not write at all
    starts: tuple[int, ...]  # first row of each request, and n

    expected: ClassVar = ("lists", "free")

    def with_only(self, rows: torch.Tensor, starts: Sequence[int]) -> "SelectedLists":
        self.reset()
        cache = self.cache.clone()
        cache[: len(rows)] = self.cache[rows.to(self.cache.device)]
        lists, free = self.lists[rows.to(self.lists.device)], self.free[rows.to(self.free.device)]
        before = storage_bytes(cache).clone()
        return replace(self, cache=cache, before=before, lists=lists, free=free, padding=0, starts=tuple(starts))

    def difference(self) -> str:
        size = self.cache.element_size()
        row, start = self.cache.shape[1] * size, self.cache.storage_offset() * size
        changed = storage_bytes(self.cache) != self.before
        writable = 0 if self.kept else len(self.lists) + self.padding
        changed[start : start + writable * row] = False
        if bool(changed.any()):
            return f"row {(int(changed.nonzero()[0]) - start) // row} was written, expected it as it was"
        if self.kept:
            return ""
        got, expected = (x.sort(dim=1).values for x in (self.cache[: len(self.lists)], self.lists))
        wrong = (got != expected).any(dim=1) & ~self.free
        if not bool(wrong.any()):
            return ""
        row = int(wrong.nonzero()[0])
        named, wanted = (set(x[row].tolist()) - {selected.NO_KEY} for x in (got, expected))
        request = next(number for number, end in enumerate(self.starts[1:]) if row < end)
        return (
            f"row {row} (query {row - self.starts[request]} of request {request}) names {len(named & wanted)} of "
            f"{len(wanted)} tokens: it lacks {_some(wanted - named)} and has {_some(named - wanted)} instead; "
            f"{int(wrong.sum())} of {len(wrong)} rows are wrong"
        )


def _some(tokens: set[int]) -> str:
    shown = ", ".join(map(str, sorted(tokens)[:4]))
    return (shown + (", …" if len(tokens) > len(shown.split(",")) else "")) or "none"
