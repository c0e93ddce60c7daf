"""Tokens that a selection over pools names: those of whole pools, all of them, and of the last one as is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mla_conformance.reference.selected import NO_KEY


@dataclass(frozen=True)
class PoolTokens:
    """What n rows named."""

    numbers: torch.Tensor  # [n, K] int64 as they were named
    tokens: torch.Tensor  # [n] int64, tokens that each row sees
    pool: int  # tokens of a pool
    tail: bool  # whether those of the last pool are asked for, where it is not whole

    def positions(self, places: int) -> torch.Tensor:
        """[n, places] numbers of the whole pools that are named, the last first, -1 behind them."""
        named = self._counts == self.pool
        numbered = torch.arange(named.shape[1], device=named.device).where(named, NO_KEY)
        found = torch.nn.functional.pad(numbered, (0, places), value=NO_KEY).sort(dim=1, descending=True)
        return found.values[:, :places]

    def wrong(self) -> Iterator[tuple[Callable[[int], str], torch.Tensor]]:
        """What may be wrong, as a clause about a row and the rows [n] bool of which it is true."""
        strange = (self.numbers != NO_KEY) & ~self._seen
        yield lambda row: f"{int(self.numbers[row][strange[row]][0])} is no token that it sees", strange.any(dim=1)
        ordered = self.numbers.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_KEY)
        yield lambda row: f"token {int(ordered[row, 1:][twice[row]][0])} is named twice", twice.any(dim=1)
        last = (self._seen & (self.numbers >= self._whole)).sum(dim=1)
        wanted = (self.tokens % self.pool) * self.tail
        yield (
            lambda row: f"{int(last[row])} tokens of the last pool are named, expected {int(wanted[row])}",
            last != wanted,
        )
        parts = (self._counts > 0) & (self._counts < self.pool)
        yield lambda row: f"not all tokens of pool {int(parts[row].int().argmax())} are named", parts.any(dim=1)

    @property
    def _seen(self) -> torch.Tensor:
        return (self.numbers >= 0) & (self.numbers < self.tokens.unsqueeze(1))

    @property
    def _whole(self) -> torch.Tensor:
        """[n, 1], tokens in whole pools."""
        return (self.tokens // self.pool * self.pool).unsqueeze(1)

    @property
    def _counts(self) -> torch.Tensor:
        """[n, W] how many tokens of each whole pool are named."""
        width = int(self.tokens.max()) // self.pool if len(self.tokens) else 0
        at = (self.numbers // self.pool).where(self._seen & (self.numbers < self._whole), width)
        found = torch.zeros(len(at), width + 1, dtype=torch.int64, device=at.device)
        return found.scatter_add_(1, at, torch.ones_like(at))[:, :width]
