"""What a library computes of lists, and what a kernel reads in a cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_conformance.backends.cache_dtypes import dequantise, gather
from mla_conformance.reference.selected import selected_attention

LATENT = 512


def attended(q: Tensor, keys: Tensor, lists: Tensor, scale: float, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Of q [T, N, D], keys [S, D] and numbers of them [T, K], or -1: output [T, N, L] of q's dtype, LSE [T, N]."""
    state = selected_attention(q, keys[:, None], keys[:, None, :LATENT], lists, scale=scale, sink=sink)
    return state.output.to(q.dtype), state.lse.mT.float()


sparse_kernel = pytest.fixture(name="sparse_kernel")(lambda: attended)


@pytest.fixture
def slots_of() -> Callable[[Tensor, str], Tensor]:
    """Every slot of a cache [blocks, page, width] of a layout, as a kernel reads it: [S, D]."""

    def read(cache: Tensor, layout: str) -> Tensor:
        slots = torch.arange(cache.shape[0] * cache.shape[1])
        return dequantise(gather(cache, slots, layout), layout, torch.tensor(1.0), torch.bfloat16)

    return read
