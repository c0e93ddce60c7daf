"""Data regimes: inputs that reveal what N(0,1) hides, each a named transform of one request's queries or values.

A regime shapes the queries, never the keys: aligning a head's queries with one key makes that key dominant whatever
produced it, so the same regime serves direct calls and keys that were up-projected from a paged cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Site:
    """One request as a regime sees it; float32 on the CPU.

    Attributes:
        q: [T, N, D] standard normal queries.
        k: [S, N, D] keys as the backend receives them.
        scale: softmax scale.
        edges: key positions next to a boundary: sequence ends, pages, chunks.
    """

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    edges: Sequence[int]


@dataclass(frozen=True)
class Regime:
    """A named way to make inputs.

    Attributes:
        sentence: what the regime reveals.
        queries: new queries of a request.
        values: new values of the whole call, [S, N, V].
    """

    sentence: str
    queries: Callable[[Site], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor] = lambda v: v


def _aligned(site: Site, logit: float) -> torch.Tensor:
    """Queries whose head h has ``logit`` more at the h-th edge key than the noise gives it."""
    if not len(site.edges):
        return site.q
    heads = site.q.shape[1]
    targets = torch.tensor([site.edges[head % len(site.edges)] for head in range(heads)])
    keys = site.k[targets, torch.arange(heads)].float()
    direction = keys / keys.square().sum(-1, keepdim=True).clamp(min=1e-6)
    return site.q + direction * (logit / site.scale)


REGIMES: dict[str, Regime] = {
    "normal": Regime("N(0,1) queries, keys and values", lambda site: site.q),
    "needle": Regime(
        "one dominant key per head at a sequence, page or chunk edge: a lost or leaked key changes everything",
        lambda site: _aligned(site, 16.0),
    ),
    "hot_tail": Regime(
        "one key holds about half of the mass over a diffuse tail: a wrong weight of the tail shows",
        lambda site: _aligned(site, max(1.0, float(torch.tensor(float(max(1, site.k.shape[0]))).log()) + 1.0)),
    ),
    "large_logits": Regime(
        "logits eight times as large: overflow, and a softmax scale applied in low precision", lambda site: site.q * 8.0
    ),
    "ones": Regime("V = 1, the output must be 1: normalisation", lambda site: site.q, torch.ones_like),
}
