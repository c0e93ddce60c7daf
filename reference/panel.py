"""A panel: consecutive rows of a request and some heads, whose sums over all their keys are taken together.

Keys that every row sees are multiplied in rectangles. What is left of a causal request is a triangle, of which all
squares of one size are one batch of products, and so are the small triangles along its edge, half of which is waste:

    ◣
    ■ ◣
    ■ ■ ◣
    ■ ■ ■ ◣
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_conformance.reference.row_sums import RowSums
from mla_conformance.reference.tiles import (
    Band,
    Blocks,
    Queries,
    RequestRows,
    TileKeys,
    cut,
    cuts,
    folded,
    heads_first,
    magnitudes,
    padded,
)

_KEYS = 2048
"""Keys whose magnitudes are counted at a time."""


@dataclass(frozen=True)
class Panel:
    """Rows of a request and what they see."""

    request: RequestRows  # whose rows
    heads: slice  # which heads
    rows: slice  # which rows of the request
    counts: Tensor  # [r] int64, how many keys each of them sees, ascending
    blocks: Blocks  # sizes of the pieces
    scale: float  # factor of the logits
    low: torch.dtype | None  # precision of the error terms' products; None without error terms

    def zeros(self, shift: Tensor | None) -> RowSums:
        """The sums over no key, relative to e^shift, [h, r, 1] or None for 0."""
        heads, width = self.heads.stop - self.heads.start, self.request.v.shape[2]
        shape = torch.Size((heads, self._padded_length, width))
        shift = None if shift is None else pad(shift, (0, 0, 0, self._padded_length - shift.shape[1]))
        return RowSums.zeros(shape, shift, self.low is not None, self.request.v.device)

    def add_to(self, sums: RowSums) -> Iterator[None]:
        """Add all visible keys to the sums, one tile a step."""
        tiles = self._tiles(sums)
        yield next(tiles, None)
        # Counted while a GPU is at its first products.
        if self.low is not None:
            self.own(sums).set_absolute(self._absolute(self.low))
        yield from tiles

    def extremes(self, sums: RowSums) -> Tensor:
        """Those of the rows that see a key; [2] float64."""
        none = bisect_left(range(self.rows.start, self.rows.stop), 1, key=self.request.visible)
        if none == self._length:
            return torch.ones(2, dtype=torch.float64, device=sums.totals.device)
        return sums.map(cut(slice(none, self._length))).extremes()

    def own(self, sums: RowSums) -> RowSums:
        """The sums without rows that only fill a block."""
        return sums.map(cut(slice(self._length)))

    def maxima(self) -> Tensor:
        """[h, r, 1] float64, the largest visible score of each row; 0 where there is none."""
        largest = self.zeros(None).totals[..., :1].contiguous().fill_(-torch.inf)
        for band, queries in self._bands():
            part = band.rows(largest)
            for tile in band.tiles(queries):
                torch.maximum(part, tile.scores().amax(dim=-1, keepdim=True), out=part)
        return largest.masked_fill_(largest == -torch.inf, 0.0)[:, : self._length]

    @property
    def at(self) -> slice:
        """Where the rows stand among those of all requests."""
        start = self.request.rows.start
        return slice(start + self.rows.start, start + self.rows.stop)

    @property
    def _length(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def _seen_by_all(self) -> int:
        """How many keys every row sees."""
        return self.request.visible(self.rows.start)

    @property
    def _stepped(self) -> bool:
        """Whether each row sees one key more than the row before, for rows enough to make batches of."""
        grows = self.request.visible(self.rows.stop - 1) - self._seen_by_all == self._length - 1
        return grows and self._seen_by_all > 0 and self._length > self.blocks.step

    @property
    def _padded_length(self) -> int:
        """Rows with those that a whole number of blocks takes."""
        return -(-self._length // self.blocks.queries) * self.blocks.queries if self._stepped else self._length

    def _keys(self, keys: slice) -> TileKeys:
        return TileKeys.widened(self.request, self.heads, keys, self.low)

    def _tiles(self, sums: RowSums) -> Iterator[None]:
        for band, queries in self._bands():
            part = sums.map(band.rows)
            for tile in band.tiles(queries):
                part.add(tile)
                yield

    def _absolute(self, low: torch.dtype) -> Tensor:
        """[h, r, V] float32, Σ |v| of the visible keys."""
        shared, request = self._seen_by_all, self.request
        if not self._stepped:
            ragged = slice(shared, request.visible(self.rows.stop - 1))
            some = _of_some(request, self.heads, self.counts, ragged, low)
            return some.add_(_of_all(request, self.heads, shared))
        start = shared - 1
        v = magnitudes(heads_first(request.v[start : start + self._length, self.heads]), low)
        steps = _in_steps(padded(v, self._padded_length), self.blocks.step)[:, : self._length]
        return steps.add_(_of_all(request, self.heads, start))

    def _bands(self) -> Iterator[tuple[Band, Queries]]:
        """Bands that have every visible pair once, and their queries."""
        queries = Queries.widened(self.request, self.heads, self.rows, self.scale, self.low)
        queries = queries.padded(self._padded_length)
        for band in self._visible():
            yield band, queries.map(band.rows)

    def _visible(self) -> Iterator[Band]:
        if self._stepped:
            # The last key that all rows see is the first row's own; with it the rows and their keys are a triangle.
            yield from self._rectangles(self._seen_by_all - 1)
            yield from self._triangle()
        else:
            yield from self._rectangles(self._seen_by_all)
            yield from self._ragged()

    def _rectangles(self, stop: int) -> Iterator[Band]:
        """The keys before ``stop``, which all rows see."""
        for span in cuts(stop, self.blocks.span):
            parts = self._keys(span).parts(self.blocks.keys)
            yield from (Band(cut(rows), parts) for rows in cuts(self._length, self.blocks.queries))

    def _triangle(self) -> Iterator[Band]:
        """As many keys as rows, of which a row sees its own and those before; the largest pieces first.

        A GPU is at work on those while the small ones are sent.
        """
        start, size = self._seen_by_all - 1, self.blocks.queries
        keys = self._keys(slice(start, start + self._length)).padded(self._padded_length)
        for rows in reversed([*cuts(self._length, size, start=size)]):
            yield Band(cut(rows), keys.map(cut(slice(rows.start))).parts(self.blocks.keys))
        while size > self.blocks.step:
            size //= 2
            yield Band(folded(2 * size, slice(size, None)), [keys.map(folded(2 * size, slice(size)))])
        yield Band(folded(size), [keys.map(folded(size))], torch.arange(1, size + 1, device=keys.k.device))

    def _ragged(self) -> Iterator[Band]:
        """The keys that only some rows see, whichever those are."""
        for block in cuts(self._length, self.blocks.queries):
            positions = range(self.rows.start + block.start, self.rows.start + block.stop)
            for part in cuts(self.request.visible(positions[-1]), self.blocks.keys, start=self._seen_by_all):
                first = bisect_left(positions, part.start + 1, key=self.request.visible)
                rows = slice(block.start + first, block.stop)
                yield Band(cut(rows), [self._keys(part)], self.counts[rows] - part.start)


def _of_all(request: RequestRows, heads: slice, keys: int) -> Tensor:
    """[h, 1, V] float32 over the first ``keys`` keys."""
    v = request.v[:keys, heads]
    v = v.to(torch.bfloat16) if v.dtype.itemsize == 1 else v  # exact, and the norm knows no float8
    dtype = torch.promote_types(v.dtype, torch.float32)
    return torch.linalg.vector_norm(v, ord=1, dim=0, dtype=dtype).unsqueeze(1).float()


def _in_steps(v: Tensor, step: int) -> Tensor:
    """[h, r, V] float32 for |v| [h, r, V]: row i sees the first i + 1 of them; r is a multiple of ``step``."""
    steps = folded(step)(v)
    lower = torch.ones(step, step, dtype=v.dtype, device=v.device).tril()
    within = (lower @ steps).float().view(v.shape[0], -1, step, v.shape[2])
    whole = steps.sum(dim=1, dtype=torch.float32).view(v.shape[0], -1, 1, v.shape[2])
    return within.add_(whole.cumsum(dim=1) - whole).view(v.shape)


def _of_some(request: RequestRows, heads: slice, counts: Tensor, keys: slice, low: torch.dtype) -> Tensor:
    """[h, r, V] float32 for rows of a request that see so many keys, over those of ``keys`` that each of them sees."""
    v = request.v[:, heads].transpose(0, 1)
    sums = torch.zeros(v.shape[0], counts.shape[0], v.shape[2], device=v.device)
    for part in cuts(keys.stop, _KEYS, start=keys.start):
        seen = torch.arange(part.start, part.stop, device=v.device) < counts[:, None]
        sums.add_(seen.to(low) @ magnitudes(v[:, part].contiguous(), low))
    return sums
