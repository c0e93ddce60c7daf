"""Data regimes: inputs that reveal what N(0,1) hides, each a named transform of one call's queries, keys or values.

Keys and values are transformed as the backend receives them, whatever produced them, so the same regime serves direct
calls and keys that were up-projected from a paged cache. A dominant key is made by aligning a head's queries with it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mla_conformance.cases.grammar import Data


@dataclass(frozen=True)
class Site:
    """One request as a regime sees it.

    Attributes:
        q: [T, N, D] standard normal queries, float32, on any device.
        k: [S, N, D] keys as the backend receives them, on any device.
        scale: softmax scale.
        edges: key positions next to a boundary: sequence ends, pages, chunks, tiles.
        causal: whether the last row sees all keys, and each row before it one fewer.
    """

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    edges: Sequence[int]
    causal: bool = False


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Regime:
    """A named way to make inputs.

    Attributes:
        sentence: what the regime reveals.
        queries: new queries of a request.
        keys: new keys [S, N, D].
        values: new values [S, N, V].
        by_element: whether a new query follows from the old one's elements alone, not from keys or other rows.
    """

    sentence: str
    queries: Callable[[Site], torch.Tensor] = lambda site: site.q
    keys: Callable[[torch.Tensor], torch.Tensor] = _same
    values: Callable[[torch.Tensor], torch.Tensor] = _same
    by_element: bool = True

    def new_queries(
        self, q: torch.Tensor, scale: float, sites: Callable[[], Iterable[tuple[slice, Site]]]
    ) -> torch.Tensor:
        """New queries for q [T, N, D], which may be written over; sites, of some rows each, where those matter."""
        if self.by_element:
            return self.queries(Site(q, q[:0], scale, ()))
        for rows, site in sites():
            q[rows] = self.queries(site)
        return q


def _aligned(site: Site, above: float) -> torch.Tensor:
    """Queries to which one edge key has e^``above`` times the mass of all others, about."""
    if not site.edges:
        return site.q
    # [T, N] the key that each row spotlights for each head: another edge that it sees for the next row and head.
    rows, last = site.q.shape[0], site.k.shape[0] - 1
    ends = torch.full((rows,), last) if not site.causal else last + 1 - rows + torch.arange(rows)
    edges = torch.cat((ends.unsqueeze(1), torch.tensor(site.edges).expand(rows, -1)), dim=1)
    seen = edges <= ends.unsqueeze(1)
    turn = torch.arange(rows).unsqueeze(1) + torch.arange(site.q.shape[1])
    places = (~seen).int().argsort(dim=1, stable=True).gather(1, turn % seen.sum(dim=1, keepdim=True))
    heads, chosen = torch.arange(site.q.shape[1], device=site.k.device), edges.gather(1, places).to(site.k.device)
    keys = site.k[chosen, heads].float().to(site.q.device)
    direction = keys / keys.square().sum(-1, keepdim=True).clamp(min=1e-6)
    return site.q + direction * ((math.log(site.k.shape[0]) + above) / site.scale)


_CHANNEL = 400.0
"""Size of the constant channel of a shifted request; its square moves raw scores by 1.6e5, exact in bf16 and fp16."""


def _constant_key(k: torch.Tensor) -> torch.Tensor:
    return torch.cat([k[..., :-1], torch.full_like(k[..., -1:], _CHANNEL)], dim=-1)


def _against_constant_key(sign: float) -> Callable[[Site], torch.Tensor]:
    return lambda site: torch.cat([site.q[..., :-1], torch.full_like(site.q[..., -1:], sign * _CHANNEL)], dim=-1)


_RAMP = 16.0


def _ramp(k: torch.Tensor) -> torch.Tensor:
    """The last channel of the keys rises from -1 to 1 along the key axis."""
    slope = torch.linspace(-1.0, 1.0, k.shape[0]).view(-1, 1, 1).expand(-1, k.shape[1], 1) if k.shape[0] else k[..., :1]
    return torch.cat([k[..., :-1] * 0.25, slope.to(k)], dim=-1)


def _along_ramp(site: Site) -> torch.Tensor:
    return torch.cat([site.q[..., :-1], torch.full_like(site.q[..., -1:], _RAMP / site.scale)], dim=-1)


def _sparse_integers(x: torch.Tensor) -> torch.Tensor:
    """Values -2 ... 2, three of four of them 0: products and sums are exact in every dtype."""
    return torch.where(x.abs() > 1.15, x.round().clamp(-2, 2), torch.zeros_like(x))


def _outliers(x: torch.Tensor) -> torch.Tensor:
    """A mean offset and every sixteenth channel ten times as large."""
    channel = torch.arange(x.shape[-1], device=x.device) % 16 == 3
    return torch.where(channel, x * 10.0, x) + 0.5


def _low_rank(x: torch.Tensor) -> torch.Tensor:
    """All rows of a head close to multiples of its first row."""
    if not x.shape[0]:
        return x
    return x[:1] * x[..., :1].sign() + 0.05 * x


REGIMES: dict[str, Regime] = {
    Data.NORMAL: Regime("N(0,1) queries, keys and values"),
    Data.NEEDLE: Regime(
        "one dominant key at an edge of a sequence, page, chunk or tile, another for each row and head, over a tail: "
        "a lost or leaked key changes everything",
        lambda site: _aligned(site, 4.0),
        by_element=False,
    ),
    Data.HOT_TAIL: Regime(
        "one key holds more than half of the mass over a diffuse tail: mass lost in the tail",
        lambda site: _aligned(site, 1.0),
        by_element=False,
    ),
    Data.HOT_ONES: Regime(
        "a hot key over a diffuse tail with V = 1: the weights must add up",
        lambda site: _aligned(site, 1.0),
        values=torch.ones_like,
        by_element=False,
    ),
    Data.LARGE_LOGITS: Regime(
        "logits × 8: overflow, and a softmax scale applied in low precision", lambda site: site.q * 8.0
    ),
    Data.HUGE_LOGITS: Regime("logits × 64: rescaling between tiles", lambda site: site.q * 64.0),
    Data.EXTREME_LOGITS: Regime("logits × 100", lambda site: site.q * 100.0),
    Data.NEGATIVE: Regime(
        "all raw scores near -1.6e5: finite sentinels for masks and maxima", _against_constant_key(-1.0), _constant_key
    ),
    Data.SHIFTED: Regime(
        "all raw scores near +1.6e5: softmax is shift invariant", _against_constant_key(1.0), _constant_key
    ),
    Data.RISING: Regime("logits rise along the key axis: the running maximum always lags", _along_ramp, _ramp),
    Data.RISING_ONES: Regime("logits rise along the key axis, V = 1", _along_ramp, _ramp, torch.ones_like),
    Data.ONES: Regime("V = 1, the output must be 1: normalisation", values=torch.ones_like),
    Data.INTEGERS: Regime(
        "sparse small integers, exact in every dtype",
        lambda site: _sparse_integers(site.q),
        _sparse_integers,
        _sparse_integers,
    ),
    Data.OUTLIERS: Regime(
        "a mean offset and outlier channels", lambda site: _outliers(site.q) * 0.1, _outliers, _outliers
    ),
    Data.LOW_RANK: Regime(
        "rows that are nearly multiples of one another",
        lambda site: _low_rank(site.q),
        _low_rank,
        _low_rank,
        by_element=False,
    ),
    Data.TINY_VALUES: Regime("values of size 1e-3: an absolute tolerance accepts zeros", values=lambda v: v * 1e-3),
    Data.ZERO_KEYS: Regime("all logits equal: the output is the mean of the visible values", keys=torch.zeros_like),
}
