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
        return self._stray() or self._wrong()

    def _stray(self) -> str:
        """Whether anything but the slots was written."""
        changed = storage_bytes(self.cache) != self.before
        self._rows(changed)[self._places] = False
        if not bool(changed.any()):
            return ""
        slots = self._rows(changed).any(dim=2).flatten().nonzero()
        if not len(slots):
            return f"bytes of the buffer of {self.name} were written that are not this layer's"
        return f"slot {int(slots[0])} of {self.name} was written, nothing belongs there"

    def _wrong(self) -> str:
        """Which number is not between the least and the most that it may be."""
        if self.bounds is None:
            return ""
        got, (low, high) = self.cache[self._places], self.bounds
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

    @property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slots // self.cache.shape[1], self.slots % self.cache.shape[1]

    def _rows(self, flags: torch.Tensor) -> torch.Tensor:
        """[blocks, page, bytes of an entry] of a bool for each byte of the storage, in place."""
        size = self.cache.element_size()
        blocks, page, width = self.cache.shape
        strides = (self.cache.stride(0) * size, self.cache.stride(1) * size, 1)
        return flags.as_strided((blocks, page, width * size), strides, self.cache.storage_offset() * size)
