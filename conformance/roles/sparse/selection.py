"""The lists of a sparse case: which keys each row names, in what order, and what stands where it names none."""

from dataclasses import dataclass, replace

import torch

from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.case import SparseCase

_HUGE = 2**31 - 1
_ROUND = 7  # of so many rows with lists of drawn lengths, one names no key, one a single key and one as many as it can


@dataclass(frozen=True)
class Lists:
    keys: torch.Tensor  # [T, K] int64 numbers of keys, or -1
    length: torch.Tensor  # [T] int64, columns up to the last key that is named

    def named(self, keys: int) -> torch.Tensor:
        found = torch.zeros(keys, dtype=torch.bool)
        found[self.keys[self.keys != NO_KEY]] = True
        return found

    def renumbered(self, numbers: torch.Tensor) -> "Lists":
        """The same lists where key k has the number ``numbers[k]``; -1 for one that is not there."""
        there, keys = self.keys != NO_KEY, torch.full_like(self.keys, NO_KEY)
        keys[there] = numbers[self.keys[there]]  # a rank may have no keys at all
        return replace(self, keys=keys)

    def handed(self, numbers: torch.Tensor, behind: str, generator: torch.Generator) -> torch.Tensor:
        """[T, K] int32 as they are handed over, with ``numbers`` [T, K] int64 for the named keys.

        ``behind`` says what stands from the length on; what is stale is drawn.
        """
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
    chosen = _chosen(bounds, columns, generator)
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


def _chosen(bounds: torch.Tensor, columns: int, generator: torch.Generator) -> torch.Tensor:
    """[T, columns] different numbers below each row's bound in drawn order, as far as there are any.

    One of each of so many equal parts of the range, so that no draw is as wide as the range is.
    """
    column, parts = torch.arange(columns), bounds.clamp(1, columns).unsqueeze(1)
    first, behind = column * bounds.unsqueeze(1) // parts, (column + 1) * bounds.unsqueeze(1) // parts
    drawn = torch.rand(len(bounds), columns, generator=generator)
    numbers = first + (drawn * (behind - first)).long()
    order = torch.rand(len(bounds), columns, generator=generator).masked_fill(column >= parts, 2.0).argsort(dim=1)
    return numbers.gather(1, order)
