"""Shared inputs of the reference's tests."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.kv_cache import PagedContext, write_latents

Normal = Callable[..., Tensor]


@pytest.fixture(scope="session")
def normal() -> Normal:
    """normal(seed, *shape): float64 drawn from N(0, 1)."""

    def draw(seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    return draw


@dataclass(frozen=True)
class PrefillBatch:
    """Three requests of small dims, the second without context, over a shuffled cache whose unused slots are NaN."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    weight_kv_b: Tensor
    query_start_loc: tuple[int, ...]
    context: PagedContext
    latents: tuple[Tensor, ...]
    scale: float = 0.31

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.q_nope, self.q_pe, self.kv_c, self.k_pe, self.weight_kv_b


@pytest.fixture(scope="session")
def prefill(normal: Normal) -> PrefillBatch:
    lens, page_size, rank, rope = (11, 0, 5), 4, 32, 8
    cache = torch.full((9, page_size, rank + rope), torch.nan, dtype=torch.float64)
    block_table = torch.tensor([[7, 2, 5], [-1, -1, -1], [4, 0, -1]])
    latents = tuple(normal(seed, length, rank + rope) for seed, length in enumerate(lens))
    for blocks, request in zip(block_table, latents, strict=True):
        token = torch.arange(len(request))
        slots = blocks[token // page_size] * page_size + token % page_size
        write_latents(cache, request[:, :rank], request[:, rank:], slots)
    return PrefillBatch(
        q_nope=normal(10, 9, 4, 16),
        q_pe=normal(11, 9, 4, rope),
        kv_c=normal(12, 9, rank),
        k_pe=normal(13, 9, rope),
        weight_kv_b=normal(14, rank, 4, 16 + 12) / rank**0.5,
        query_start_loc=(0, 4, 6, 9),
        context=PagedContext(cache, block_table, lens, workspace_tokens=8),
        latents=latents,
    )
