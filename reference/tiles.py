"""The rows of requests and the keys that they see, widened, and the pieces that are multiplied with each other."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.reference.attention import Starts, segments

View = Callable[[Tensor], Tensor]  # picks rows of a [h, rows, columns] tensor, without a copy


def cut(rows: slice) -> View:
    """The rows ``rows`` of every head."""
    return lambda x: x[:, rows]


def folded(size: int, rows: slice = slice(None)) -> View:
    """The rows ``rows`` of every ``size`` consecutive rows, each such piece in the place of a head."""
    return lambda x: x.view(-1, size, x.shape[-1])[:, rows]


def padded(rows: int) -> View:
    """[h, r, columns] with zeros up to ``rows`` rows: a copy where some are missing."""
    return lambda x: x if x.shape[1] == rows else pad(x, (0, 0, 0, rows - x.shape[1]))


@dataclass(frozen=True)
class RequestRows:
    q: Tensor  # [r, N, D], the rows
    k: Tensor  # [S, N, D], all keys of the request
    v: Tensor  # [S, N, V]
    rows: slice  # where the rows stand among those of all requests
    positions: Sequence[int]  # number of each row within its request, ascending
    diagonal: int  # what a row sees beyond its own position, less one

    def counts(self) -> Tensor:
        """[r] int64, ascending: row i sees keys 0 … counts[i] - 1."""
        return (_index(self.positions, self.k.device) + self.diagonal + 1).clamp_(0, self.k.shape[0])

    def visible(self, row: int) -> int:
        """How many keys a row sees, without a look at the device."""
        return min(max(self.positions[row] + self.diagonal + 1, 0), self.k.shape[0])


def requests_of(
    q: Tensor, k: Tensor, v: Tensor, query_start_loc: Starts, key_start_loc: Starts, causal: bool, rows: Starts | None
) -> Iterator[RequestRows]:
    """The requests that own a row of ``rows``; arguments as of `blockwise_attention`."""
    k, v = (x.expand(-1, q.shape[1], -1) for x in (k, v))
    done = 0
    for queries, keys in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        own, kv_len = q[queries], keys.stop - keys.start
        positions: Sequence[int] = range(len(own))
        if rows is not None:
            positions = [row - queries.start for row in rows if queries.start <= row < queries.stop]
        if positions:
            yield RequestRows(
                q=own if rows is None else own[_index(positions, q.device)],
                k=k[keys],
                v=v[keys],
                rows=slice(done, done + len(positions)),
                positions=positions,
                diagonal=kv_len - len(own) if causal else kv_len,
            )
            done += len(positions)


def _index(positions: Sequence[int], device: torch.device) -> Tensor:
    every = isinstance(positions, range)
    return torch.arange(len(positions), device=device) if every else torch.tensor(positions, device=device)


@dataclass(frozen=True)
class Queries:
    wide: Tensor  # [h, r, D], float32 where that holds the operand and a GPU's kernel reads it, float64 otherwise
    factor: Tensor | None  # [] float64, the scale that their products are still to be multiplied with, or None
    low: Tensor  # [h, r, D] their magnitudes, times the scale's, in low precision

    @staticmethod
    def widened(request: RequestRows, heads: slice, rows: slice, scale: float, low: torch.dtype) -> "Queries":
        q = heads_first(request.q[rows, heads])
        wide = q.to(score_dtype(q, low))
        scaled = wide * scale
        factor = None if wide.dtype == torch.float64 else torch.full((), scale, dtype=torch.float64, device=q.device)
        return Queries(scaled if factor is None else wide, factor, magnitudes(scaled, low))

    def map(self, view: View) -> "Queries":
        return Queries(view(self.wide), self.factor, view(self.low))


@dataclass(frozen=True)
class TileKeys:
    k: Tensor  # [h, c, D], in float32 or float64 as queries are
    v: Tensor  # [h, c, V] float64
    low_k: Tensor  # [h, c, D], |k| in low precision
    low_v: Tensor  # [3h, c, V], what the products p, p·magnitude and p² are multiplied with: |v|, |v| and v²

    @staticmethod
    def widened(request: RequestRows, heads: slice, keys: slice, low: torch.dtype) -> "TileKeys":
        k, v = heads_first(request.k[keys, heads]), heads_first(request.v[keys, heads])
        absolute = magnitudes(v, low)
        low_v = torch.cat((absolute, absolute, absolute.square()))
        return TileKeys(k.to(score_dtype(k, low)), v.double(), magnitudes(k, low), low_v)

    def parts(self, width: int) -> list["TileKeys"]:
        return [self.map(cut(part)) for part in cuts(self.k.shape[1], width)]

    def map(self, view: View) -> "TileKeys":
        return TileKeys(*map(view, vars(self).values()))


@dataclass(frozen=True)
class Tile:
    queries: Queries  # r rows of h heads
    keys: TileKeys  # c keys of them
    seen: Tensor | None  # [r] int64, how many of the keys each row sees, or None for all

    def scores(self) -> Tensor:
        """[h, r, c] float64, -inf where a row does not see a key."""
        scores = torch.bmm(self.queries.wide.double(), self.keys.k.double().mT)
        if self.queries.factor is not None:
            scores.mul_(self.queries.factor)
        if self.seen is None:
            return scores
        number = torch.arange(scores.shape[2], device=scores.device)
        return scores.masked_fill_(number >= self.seen[:, None], -torch.inf)

    def products(self) -> Tensor:
        """[3, h, r, c] in low precision, with the magnitudes of the scores, which bound them, as the second."""
        low, keys = self.queries.low, self.keys.low_k
        products = low.new_empty(3, *low.shape[:2], keys.shape[1])
        torch.bmm(low, keys.mT, out=products[1])
        return products


def heads_first(x: Tensor) -> Tensor:
    """[rows, h, columns] as [h, rows, columns], contiguous: conversions of such are several times as fast on a GPU."""
    return x.transpose(0, 1).contiguous()


def magnitudes(x: Tensor, low: torch.dtype) -> Tensor:
    """|x| in low precision, of any float dtype."""
    return x.abs() if x.dtype == low else x.to(low).abs_()


def score_dtype(x: Tensor, low: torch.dtype) -> torch.dtype:
    """What scores are made from: float64, and on a large problem float32, where that holds the operand."""
    return torch.float32 if low == torch.bfloat16 and x.dtype.itemsize <= 4 else torch.float64


LANES = 2  # works on a GPU at a time: while one is in its matrix products, another one moves memory, or begins
_END = object()

_GPU_BYTES = 3_040_000_000
_CPU_BYTES = 48_000_000
_SHARE_OF_FREE = 0.5


@dataclass(frozen=True)
class Blocks:
    heads: int  # heads in a batch of matrix products
    panel: int  # queries whose sums are taken together, a multiple of ``queries``
    queries: int  # queries in a block, ``step`` times a power of two
    step: int  # queries in the smallest block, half of which may be hidden
    keys: int  # keys in a block
    span: int  # keys that are widened to float64 at a time, a multiple of ``keys``


def plan_blocks(device: torch.device, *, heads: int, key_bytes: int, pair_bytes: int) -> Blocks:
    """Blocks that fit the workspace, by bytes of a widened key of a head, and of a row's score and products with it."""
    group, rows, step, lane = min(heads, 4), 128, 32, _CPU_BYTES
    if device.type == "cuda":
        group, rows, step = min(heads, 8), 2048, 256
        free, _ = torch.cuda.mem_get_info(device)
        if _SHARE_OF_FREE * free < _GPU_BYTES:  # asked only then, since the allocator takes a while to answer
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        lane = min(_GPU_BYTES, int(_SHARE_OF_FREE * free)) // LANES
    width = _rounded(int(0.625 * lane) // (pair_bytes * group * rows), 512, 2 * rows)
    # A row and its sums take half as much again as a key. A triangle has as many keys as rows, and when its keys are
    # there those of a span no longer are.
    panel = _rounded(int(0.375 * lane) // (group * key_bytes * 5 // 2), rows, 4 * rows)
    span = _rounded(int(0.15 * lane) // (group * key_bytes), width)
    return Blocks(heads=group, panel=panel, queries=rows, step=step, keys=width, span=span)


def _rounded(number: int, multiple: int, most: int = 2**30) -> int:
    """``number`` rounded down to a multiple, at least one of it and ``most`` at most."""
    return min(most, max(multiple, number // multiple * multiple))


def cuts(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of ``step`` from ``start`` to ``stop``; the last may be shorter."""
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def in_lanes(device: torch.device, works: Sequence[Iterator[object]]) -> None:
    """Run every work to its end, step by step; on a GPU several at a time, each on a stream."""
    if device.type != "cuda":
        deque(chain.from_iterable(works), maxlen=0)
        return
    main, streams = torch.cuda.current_stream(device), _streams(device)

    def on(stream: torch.cuda.Stream, steps: Iterator[object]) -> Iterator[None]:
        while True:
            with torch.cuda.stream(stream):
                if next(steps, _END) is _END:
                    return
            yield

    for stream in streams:
        stream.wait_stream(main)
    lanes = (on(stream, chain.from_iterable(works[lane::LANES])) for lane, stream in enumerate(streams))
    for step in zip_longest(*lanes):
        del step
    for stream in streams:
        main.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]
