"""Σ |v| over the keys that each row sees, which takes no weights, only counting."""

import torch
from torch import Tensor

from mla_conformance.reference.blocks import cuts
from mla_conformance.reference.tiles import folded, magnitudes
from mla_conformance.reference.visible import Request

_KEYS = 2048


def seen_by_all(request: Request, heads: slice, keys: int) -> Tensor:
    """[h, 1, V] float32 over the first ``keys`` keys."""
    v = request.v[:keys, heads]
    v = v.to(torch.bfloat16) if v.dtype.itemsize == 1 else v  # exact, and the norm knows no float8
    dtype = torch.promote_types(v.dtype, torch.float32)
    return torch.linalg.vector_norm(v, ord=1, dim=0, dtype=dtype).unsqueeze(1).float()


def seen_in_steps(v: Tensor, step: int) -> Tensor:
    """[h, r, V] float32 for |v| [h, r, V]: row i sees the first i + 1 of them; r is a multiple of ``step``."""
    steps = folded(step)(v)
    lower = torch.ones(step, step, dtype=v.dtype, device=v.device).tril()
    within = (lower @ steps).float().view(v.shape[0], -1, step, v.shape[2])
    whole = steps.sum(dim=1, dtype=torch.float32).view(v.shape[0], -1, 1, v.shape[2])
    return within.add_(whole.cumsum(dim=1) - whole).view(v.shape)


def seen_by_some(request: Request, heads: slice, rows: slice, start: int, low: torch.dtype) -> Tensor:
    """[h, r, V] float32 for some rows of a request, over the keys from ``start`` on that each of them sees."""
    counts, v = request.counts[rows, None], request.v[:, heads].transpose(0, 1)
    sums = torch.zeros(v.shape[0], counts.shape[0], v.shape[2], device=v.device)
    for keys in cuts(request.visible(rows.stop - 1), _KEYS, start=start):
        seen = torch.arange(keys.start, keys.stop, device=v.device) < counts
        sums.add_(seen.to(low) @ magnitudes(v[:, keys].contiguous(), low))
    return sums
