"""What a layer leaves in the buffer of selected tokens: the tokens of each row, for the layers behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mla_conformance.problems.memory import Written, storage_bytes
from mla_conformance.reference.selected import NO_KEY


@dataclass(frozen=True)
class SelectedLists(Written):
    """The buffer [T or more, K] int32."""

    lists: torch.Tensor  # [n, K] int32, what the first n rows must name, in any order
    free: torch.Tensor  # [n] bool, rows that no layer need read
    padding: int  # rows behind them that may hold anything
    kept: bool  # whether the layer may not write at all
    starts: tuple[int, ...]  # first row of each request, and n

    expected: ClassVar = ("lists", "free")

    def with_only(self, rows: torch.Tensor, starts: Sequence[int]) -> "SelectedLists":
        """The buffer of a batch of these rows alone."""
        self.reset()
        cache = self.cache.clone()
        cache[: len(rows)] = self.cache[rows.to(self.cache.device)]
        lists, free = self.lists[rows.to(self.lists.device)], self.free[rows.to(self.free.device)]
        before = storage_bytes(cache).clone()
        return replace(self, cache=cache, before=before, lists=lists, free=free, padding=0, starts=tuple(starts))

    def difference(self) -> str:
        row, start = self.cache.shape[1] * self.cache.element_size(), self.cache.data_ptr()
        start -= self.cache.untyped_storage().data_ptr()
        changed = storage_bytes(self.cache) != self.before
        changed[start : start + self._writable * row] = False
        if bool(changed.any()):
            return f"row {(int(changed.nonzero()[0]) - start) // row} was written, expected it as it was"
        return "" if self.kept else self._wrong()

    @property
    def _writable(self) -> int:
        """Rows that a layer may write."""
        return 0 if self.kept else len(self.lists) + self.padding

    def _wrong(self) -> str:
        """Which row names other tokens than it must."""
        got, expected = (x.sort(dim=1).values for x in (self.cache[: len(self.lists)], self.lists))
        wrong = (got != expected).any(dim=1) & ~self.free
        if not bool(wrong.any()):
            return ""
        row = int(wrong.nonzero()[0])
        named, wanted = (set(x[row].tolist()) - {NO_KEY} for x in (got, expected))
        request = next(number for number, end in enumerate(self.starts[1:]) if row < end)
        return (
            f"row {row} (query {row - self.starts[request]} of request {request}) names {len(named & wanted)} of "
            f"{len(wanted)} tokens: it lacks {_some(wanted - named)} and has {_some(named - wanted)} instead; "
            f"{int(wrong.sum())} of {len(wrong)} rows are wrong"
        )


def _some(tokens: set[int]) -> str:
    """The first of them."""
    shown = ", ".join(map(str, sorted(tokens)[:4]))
    return (shown + (", …" if len(tokens) > len(shown.split(",")) else "")) or "none"
