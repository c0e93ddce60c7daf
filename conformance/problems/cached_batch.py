"""The batch of a case over a paged cache: its lengths, the entries of its tokens, and what of them a rank holds."""

from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.operands import Draw, start_loc
from mla_conformance.reference.cache_layout import decode_rows, encode
from mla_conformance.reference.kv_cache import local_positions

AnyCached = TypeVar("AnyCached", bound=CachedCase)


class CachedBatch(Draw[AnyCached]):
    """The batch before its tokens are dealt out to ranks."""

    @cached_property
    def query_lens(self) -> tuple[int, ...]:
        """Query tokens of each request, rows of padding last."""
        return self.case.q + (1,) * self.case.pad

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        """First query token of each request, and the end."""
        return start_loc(self.query_lens)

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Cached tokens of each request on all ranks, its new ones included; none of a row of padding."""
        return tuple(q + kv for q, kv in zip(self.case.q, self.case.kv, strict=True)) + (0,) * self.case.pad

    @cached_property
    def k_scale(self) -> torch.Tensor:
        """Float32 scalar on the device."""
        return torch.tensor(self.case.cache_scale, dtype=torch.float32, device=self.device)

    @cached_property
    def entries(self) -> torch.Tensor:
        """[S, width] entries of all tokens, on the CPU."""
        return self.draw_entries(sum(self.totals), self.case.cache)

    @cached_property
    def keys(self) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what the entries mean."""
        return self.meaning(self.entries, self.case.cache)

    def draw_entries(self, tokens: int, layout: str) -> torch.Tensor:
        """[tokens, width] entries of a layout as the data regime makes keys, on the CPU."""
        case, rank = self.case, self.case.kv_lora_rank
        width = rank + case.dimensions.qk_rope_head_dim
        keys = self.regime.keys(torch.randn(tokens, 1, width, generator=self.generator))[:, 0]
        kv_c = self.regime.values(keys[:, :rank])
        parts = kv_c.to(self.dtype), keys[:, rank:].to(self.dtype)
        return encode(*parts, layout, float(self.k_scale), case.scales)

    def meaning(self, entries: torch.Tensor, layout: str) -> torch.Tensor:
        """[S, 1, L + R] float64 on the device: what entries mean."""
        parts = decode_rows(entries, layout, float(self.k_scale), *self.case.latent_dims, self.dtype)
        return torch.cat(parts, dim=-1).unsqueeze(1).to(self.device)

    def owned(self, rank: int) -> tuple[list[int], list[int]]:
        """How many tokens of each request a rank holds, and the numbers of these tokens among those of the batch."""
        firsts = zip(start_loc(self.totals), self.totals, strict=False)
        rows = [[first + position for position in self._positions(total, rank)] for first, total in firsts]
        return [len(numbers) for numbers in rows], [number for numbers in rows for number in numbers]

    def _positions(self, total: int, rank: int) -> Sequence[int]:
        if self.case.ranks == 1:
            return range(total)
        return local_positions(total, rank=rank, world_size=self.case.ranks, interleave=self.case.interleave)


def int32(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int32."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
