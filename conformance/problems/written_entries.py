"""Entries of a paged cache that calls write in the caller's memory: between which values they must be, and where."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from mla_conformance.problems.memory import Written, storage_bytes


@dataclass(frozen=True)
class WrittenEntries(Written):
    """A paged cache [blocks, page, width]."""

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
        """What must become of a cache as it is now."""
        on = cache.device
        low_high = (bounds[0].to(on), bounds[1].to(on)) if bounds else None
        return WrittenEntries(cache, storage_bytes(cache).clone(), name, slots.to(on), starts, low_high)

    def difference(self) -> str:
        changed = storage_bytes(self.cache) != self.before
        size, (blocks, page, width) = self.cache.element_size(), self.cache.shape
        strides = (self.cache.stride(0) * size, self.cache.stride(1) * size, 1)
        # [blocks, page, bytes of an entry], in place.
        rows = changed.as_strided((blocks, page, width * size), strides, self.cache.storage_offset() * size)
        places = self.slots // page, self.slots % page
        rows[places] = False
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
