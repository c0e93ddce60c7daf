"""Which keys the rows of a batch see: of each request, the first so many."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mla_conformance.reference.attention import segments


@dataclass(frozen=True)
class Request:
    """Rows of one request whose attention is computed.

    Attributes:
        q: [r, N, D], the rows.
        k: [S, N, D], all keys of the request.
        v: [S, N, V].
        rows: where the rows stand among those of all requests.
        positions: number of each row within its request, ascending.
        diagonal: what a row sees beyond its own position, less one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: slice
    positions: Sequence[int]
    diagonal: int

    @property
    def pairs(self) -> int:
        """Rows times keys times heads, the invisible ones included."""
        return len(self.positions) * self.k.shape[0] * self.q.shape[1]

    @cached_property
    def counts(self) -> Tensor:
        """[r] int64, ascending: row i sees keys 0 … counts[i] - 1."""
        return (_index(self.positions, self.k.device) + self.diagonal + 1).clamp_(0, self.k.shape[0])

    def visible(self, row: int) -> int:
        """How many keys a row sees, without a look at the device."""
        return _clamped(self.positions[row] + self.diagonal + 1, self.k.shape[0])


def requests_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
    causal: bool,
    rows: Sequence[int] | None,
) -> Iterator[Request]:
    """The requests that own a row of ``rows`` (ascending query numbers of the batch; None is all of them).

    Operands and start locations are those of `attention`; k and v are expanded to the query's heads.
    """
    k, v = (x.expand(-1, q.shape[1], -1) for x in (k, v))
    done = 0
    for queries, keys in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        positions = _positions(queries, rows)
        if positions:
            request = _request(q[queries], k[keys], v[keys], positions, causal, done)
            done = request.rows.stop
            yield request


def _positions(queries: slice, rows: Sequence[int] | None) -> Sequence[int]:
    """The chosen rows of a request, counted from its first."""
    if rows is None:
        return range(queries.stop - queries.start)
    return [row - queries.start for row in rows if queries.start <= row < queries.stop]


def _request(q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int], causal: bool, start: int) -> Request:
    q_len, kv_len = q.shape[0], k.shape[0]
    return Request(
        q=q if isinstance(positions, range) else q[_index(positions, q.device)],
        k=k,
        v=v,
        rows=slice(start, start + len(positions)),
        positions=positions,
        diagonal=kv_len - q_len if causal else kv_len,
    )


def _index(positions: Sequence[int], device: torch.device) -> Tensor:
    every = isinstance(positions, range)
    return torch.arange(len(positions), device=device) if every else torch.tensor(positions, device=device)


def _clamped(number: int, most: int) -> int:
    return min(max(number, 0), most)
