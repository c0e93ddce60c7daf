"""Shared inputs of the reference's tests."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.cache_layout import write_rows
from mla_conformance.reference.layer import PagedContext

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

    query_start_loc: tuple[int, ...]
    context: PagedContext
    latents: tuple[Tensor, ...]


@pytest.fixture(scope="session")
def prefill(normal: Normal) -> PrefillBatch:
    lens, page_size, rank, rope = (11, 0, 5), 4, 32, 8
    cache = torch.full((9, page_size, rank + rope), torch.nan, dtype=torch.float64)
    block_table = torch.tensor([[7, 2, 5], [-1, -1, -1], [4, 0, -1]])
    latents = tuple(normal(seed, length, rank + rope) for seed, length in enumerate(lens))
    for blocks, request in zip(block_table, latents, strict=True):
        token = torch.arange(len(request))
        slots = blocks[token // page_size] * page_size + token % page_size
        write_rows(cache, request, slots)
    return PrefillBatch((0, 4, 6, 9), PagedContext(cache, block_table, lens, workspace_tokens=8), latents)
