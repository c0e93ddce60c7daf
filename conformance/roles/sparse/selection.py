"""The lists of a sparse case: which keys each row names, in what order, and what stands where it names none."""

from dataclasses import dataclass, replace

import torch

from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.case import SparseCase

_HUGE = 2**31 - 1
_ROUND = 7
"""Of so many rows with lists of drawn lengths, one names no key, one a single key and one as many as it can."""


@dataclass(frozen=True)
class Lists:
    """What each row of a batch names."""

    keys: torch.Tensor  # [T, K] int64 numbers of keys, or -1
    length: torch.Tensor  # [T] int64, columns up to the last key that is named

    @property
    def counted(self) -> torch.Tensor:
        """[T, K] bool, the columns up to the length."""
        return torch.arange(self.keys.shape[1]) < self.length.unsqueeze(1)

    def named(self, keys: int) -> torch.Tensor:
        """[keys] bool, which keys some list names."""
        found = torch.zeros(keys, dtype=torch.bool)
        found[self.keys[self.keys != NO_KEY]] = True
        return found

    def renumbered(self, numbers: torch.Tensor) -> "Lists":
        """The same lists where key k has the number ``numbers[k]``; -1 for one that is not there."""
        there, keys = self.keys != NO_KEY, torch.full_like(self.keys, NO_KEY)
        keys[there] = numbers[self.keys[there]]  # a rank may have no keys at all
        return replace(self, keys=keys)

    def handed(self, numbers: torch.Tensor, behind: str, generator: torch.Generator) -> torch.Tensor:
        """[T, K] int32 as they are handed over.

        Args:
            numbers: [T, K] int64, what stands for each named key.
            behind: what stands from the length on; ``minus``, ``zero``, ``stale`` or ``huge``.
            generator: draws what is stale.
        """
        filling = torch.full_like(numbers, {"minus": NO_KEY, "zero": 0, "huge": _HUGE}.get(behind, NO_KEY))
        used = numbers[numbers != NO_KEY]
        if behind == "stale" and len(used):
            filling = used[torch.randint(len(used), numbers.shape, generator=generator)]
        return torch.where(self.counted, numbers, filling).int()


def draw_lists(
    case: SparseCase, firsts: torch.Tensor, bounds: torch.Tensor, columns: int, generator: torch.Generator
) -> Lists:
    """Lists of so many columns, as the case says.

    Args:
        case: gives how many keys a list names, their order, and where the others stand.
        firsts: [T] int64, the first key that each row may name.
        bounds: [T] int64, how many keys from there on it may name.
        columns: K.
        generator: draws them.
    """
    counts = _counts(case.fill, bounds.clamp(max=columns), generator)
    chosen = _chosen(bounds, columns, generator)
    if case.repeats:
        chosen = _repeated(chosen, counts)
    named = torch.arange(columns) < counts.unsqueeze(1)
    chosen = _ordered(chosen + firsts.unsqueeze(1), named, case.order)
    held = _held(case.holes, counts, columns, generator)
    # The n-th column that holds a key holds the n-th of them.
    keys = torch.where(held, chosen.gather(1, (held.cumsum(1) - 1).clamp(min=0)), NO_KEY)
    last = torch.where(held, torch.arange(1, columns + 1), 0).amax(dim=1)
    return Lists(keys, last)


def _counts(fill: str, most: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[T] keys that each list names."""
    drawn = (torch.rand(len(most), generator=generator) * (most + 1)).long()
    if fill == "full":
        return most
    row = torch.arange(len(most)) % _ROUND
    drawn = torch.where(row == 1, most, drawn)
    return torch.where(row == 2, 0, torch.where(row == 4, most.clamp(max=1), drawn))


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


def _repeated(chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The last quarter of each list's keys replaced by its first ones."""
    column = torch.arange(chosen.shape[1])
    first = (counts - counts // 4).unsqueeze(1)
    return chosen.gather(1, torch.where(column >= first, column - first, column).clamp(max=chosen.shape[1] - 1))


def _ordered(keys: torch.Tensor, named: torch.Tensor, order: str) -> torch.Tensor:
    """Each row's named keys, which stand first, in the order."""
    if order == "drawn":
        return keys
    descending = order == "descending"
    behind = keys.masked_fill(~named, -1 if descending else torch.iinfo(torch.int64).max)
    return behind.sort(dim=1, descending=descending).values


def _held(holes: str, counts: torch.Tensor, columns: int, generator: torch.Generator) -> torch.Tensor:
    """[T, columns] bool, which columns hold a key."""
    column = torch.arange(columns).expand(len(counts), columns)
    if holes == "front":
        return column >= columns - counts.unsqueeze(1)
    if holes == "scattered":
        column = torch.rand(len(counts), columns, generator=generator).argsort(dim=1).argsort(dim=1)
    return column < counts.unsqueeze(1)
