"""Rows of the caller's memory that a call fills: what they must hold, and what must stay as it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from mla_conformance.problems.memory import Guarded, Written, poison, storage_bytes

_FILLING = 0x5A
"""Of numbers before a call, since all bits set would be -1, which is right in some places."""


@dataclass(frozen=True)
class WrittenRows(Written):
    """A tensor [rows, …] between guard zones."""

    name: str  # how messages call it
    low: torch.Tensor  # [n, …] the least that the first n rows may hold, in its dtype
    high: torch.Tensor  # [n, …] the most
    starts: tuple[int, ...]  # first row of each request, and n

    expected: ClassVar = ("low", "high")

    @staticmethod
    def allocate(
        name: str, low: torch.Tensor, high: torch.Tensor, *, behind: int, starts: Sequence[int], kind: str = "nan"
    ) -> "WrittenRows":
        """Rows for what is expected, and so many ``behind`` them; all hold poison of a kind, or no right number."""
        shape = (len(low) + behind, *low.shape[1:])
        guarded = Guarded.allocate(shape, low.dtype, low.device)
        if low.dtype.is_floating_point:
            guarded.view.copy_(poison(shape, low.dtype, low.device, kind))
        else:
            guarded.view.view(torch.uint8).fill_(_FILLING)
        return WrittenRows(guarded.view, guarded.storage.clone(), name, low, high, tuple(starts))

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
        # Codes by their bytes, which alone can be right.
        compared = (self.cache[: len(self.low)], self.low, self.high)
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
