"""Golden attention in blocks: the values of `attention`, within a bounded workspace and near the machine's speed.

A row sees the first so many keys of its request, so causal, unmasked and sampled rows are one algorithm.
"""

import math
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mla_conformance.reference import attention as definition
from mla_conformance.reference import row_sums, tiles
from mla_conformance.reference.attention import AttentionState, Starts, attention, workspace_elements

_KEYS = 2048  # whose magnitudes are counted at a time


@dataclass
class Panel:
    """Consecutive rows of a request and some heads, whose sums over all their keys are taken together.

    Keys that every row sees are multiplied in rectangles. What is left of a causal request is a triangle, of which all
    squares of one size are one batch of products, and so are the small triangles along its edge, half of which is
    waste:

        ◣
        ■ ◣
        ■ ■ ◣
        ■ ■ ■ ◣
    """

    request: tiles.RequestRows  # whose rows
    heads: slice  # which heads
    rows: slice  # which rows of the request
    counts: Tensor  # [r] int64, how many keys each of them sees, ascending
    blocks: tiles.Blocks  # sizes of the pieces
    scale: float  # factor of the logits
    low: torch.dtype  # precision of the error terms' products
    at: slice = field(init=False)  # where its rows stand among those of all requests
    length: int = field(init=False)  # how many there are
    padded: int = field(init=False)  # and up to a multiple of the blocks' queries, where they are stepped
    seen_by_all: int = field(init=False)  # keys that each row sees
    stepped: bool = field(init=False)  # whether each row sees one key more than the row before, and batches pay

    def __post_init__(self) -> None:
        request, rows, size = self.request, self.rows, self.blocks.queries
        self.at = slice(request.rows.start + rows.start, request.rows.start + rows.stop)
        self.length, self.seen_by_all = rows.stop - rows.start, request.visible(rows.start)
        grows = request.visible(rows.stop - 1) - self.seen_by_all == self.length - 1
        self.stepped = grows and self.seen_by_all > 0 and self.length > self.blocks.step
        self.padded = -(-self.length // size) * size if self.stepped else self.length

    def summed(self, shift: Tensor) -> Generator[None, None, row_sums.RowSums]:
        """The sums over all visible keys relative to e^shift, [h, r, 1]; one tile a step."""
        every = row_sums.RowSums.zeros(tiles.padded(self.padded)(shift).contiguous(), self.request.v.shape[2])
        sums = every.map(tiles.cut(slice(self.length)))
        sums.absolute.copy_(self._absolute())
        for rows, tile in self._pieces():
            every.map(rows).add(tile)
            yield
        return sums

    def extremes(self, sums: row_sums.RowSums) -> Tensor:
        none = bisect_left(range(self.rows.start, self.rows.stop), 1, key=self.request.visible)
        if none == self.length:
            return torch.ones(2, dtype=torch.float64, device=sums.totals.device)
        return sums.map(tiles.cut(slice(none, self.length))).extremes()

    def maxima(self) -> Tensor:
        """[h, r, 1] float64, the largest visible score of each row; 0 where there is none."""
        shape = (self.heads.stop - self.heads.start, self.padded, 1)
        largest = torch.full(shape, -torch.inf, dtype=torch.float64, device=self.request.k.device)
        for rows, tile in self._pieces():
            part = rows(largest)
            torch.maximum(part, tile.scores().amax(dim=-1, keepdim=True), out=part)
        return largest.masked_fill_(largest == -torch.inf, 0.0)[:, : self.length]

    def _absolute(self) -> Tensor:
        """[h, r, V] float32, Σ |v| of the visible keys."""
        shared, request, low = self.seen_by_all, self.request, self.low

        def of_all(keys: int) -> Tensor:  # of the first ones, [h, 1, V]
            return row_sums.norms(request.v[:keys, self.heads], order=1, dim=0).unsqueeze(1).float()

        if not self.stepped:
            v = request.v[:, self.heads].transpose(0, 1)
            sums = torch.zeros(v.shape[0], len(self.counts), v.shape[2], device=v.device)
            for part in tiles.cuts(request.visible(self.rows.stop - 1), _KEYS, start=shared):
                seen = torch.arange(part.start, part.stop, device=v.device) < self.counts[:, None]
                sums.add_(seen.to(low) @ tiles.magnitudes(v[:, part].contiguous(), low))
            return sums.add_(of_all(shared))
        # Row i sees the first i + 1 keys from ``start`` on, which are summed in steps.
        start, step = shared - 1, self.blocks.step
        v = tiles.magnitudes(tiles.heads_first(request.v[start : start + self.length, self.heads]), low)
        v = tiles.padded(self.padded)(v)
        steps = tiles.folded(step)(v)
        lower = torch.ones(step, step, dtype=v.dtype, device=v.device).tril()
        within = (lower @ steps).float().view(v.shape[0], -1, step, v.shape[2])
        whole = steps.sum(dim=1, dtype=torch.float32).view(v.shape[0], -1, 1, v.shape[2])
        return within.add_(whole.cumsum(dim=1) - whole).view(v.shape)[:, : self.length].add_(of_all(start))

    def _pieces(self) -> Iterator[tuple[tiles.View, tiles.Tile]]:
        """Tiles that have every visible pair once, and what picks their rows."""
        queries = tiles.Queries.widened(self.request, self.heads, self.rows, self.scale, self.low)
        queries, size = queries.map(tiles.padded(self.padded)), self.blocks.queries
        first = self.seen_by_all - self.stepped  # of the keys that are not multiplied in rectangles

        def widened(keys: slice) -> tiles.TileKeys:
            return tiles.TileKeys.widened(self.request, self.heads, keys, self.low)

        def pieces(
            rows: tiles.View, parts: Sequence[tiles.TileKeys], seen: Tensor | None = None
        ) -> Iterator[tuple[tiles.View, tiles.Tile]]:
            own = queries.map(rows)
            return ((rows, tiles.Tile(own, keys, seen)) for keys in parts)

        for span in tiles.cuts(first, self.blocks.span):
            parts = widened(span).parts(self.blocks.keys)
            for block in tiles.cuts(self.length, size):
                yield from pieces(tiles.cut(block), parts)
        if not self.stepped:
            for block in tiles.cuts(self.length, size):
                positions = range(self.rows.start + block.start, self.rows.start + block.stop)
                for part in tiles.cuts(self.request.visible(positions[-1]), self.blocks.keys, start=first):
                    seeing = bisect_left(positions, part.start + 1, key=self.request.visible)
                    rows = slice(block.start + seeing, block.stop)
                    yield from pieces(tiles.cut(rows), [widened(part)], self.counts[rows] - part.start)
            return
        # The last key that all rows see is the first one's own; with it the rows and their keys are a triangle, of
        # which a row sees its own key and those before. The largest pieces come first, to keep a GPU busy.
        keys = widened(slice(first, first + self.length)).map(tiles.padded(self.padded))
        for rows in reversed([*tiles.cuts(self.length, size, start=size)]):
            yield from pieces(tiles.cut(rows), keys.map(tiles.cut(slice(rows.start))).parts(self.blocks.keys))
        while size > self.blocks.step:
            size //= 2
            seen = keys.map(tiles.folded(2 * size, slice(size)))
            yield from pieces(tiles.folded(2 * size, slice(size, None)), [seen])
        last = torch.arange(1, size + 1, device=keys.k.device)
        yield from pieces(tiles.folded(size), [keys.map(tiles.folded(size))], last)


# Pairs of a query and a key, over all heads, from which a GPU's error terms are bfloat16; float32 below.
_LOW_PRECISION_PAIRS = 2**28
# Pairs of a request from which blocks pay; smaller requests are one block of the definition. On a GPU, which waits for
# its next small operation, those are that fit the definition's workspace.
_BLOCK_PAIRS = 2**20
_COPIED = 2**15  # elements of the keys of a request from which a CPU would rather not have them for each of its heads
_SHARED_ROWS = 32  # of a request, up to which keys that heads share stay with the definition; blocks copy them for each


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_start_loc: Starts,
    key_start_loc: Starts,
    scale: float,
    causal: bool,
    with_key_terms: bool = False,
    rows: Sequence[int] | None = None,
) -> AttentionState:
    """What `attention` returns with error terms, or of it the rows ``rows``, ascending query numbers.

    Output and LSE agree with it to float64 rounding. Error terms are float32; of large problems on a GPU they are
    made in bfloat16 and up to 5 % larger. Key terms, and operands that are not finite, are left to the definition.
    """
    definition.check_operands(q, k, v, query_start_loc, key_start_loc)
    heads = q.shape[1]
    numbers = range(query_start_loc[-1]) if rows is None else rows
    owned = [bisect_left(numbers, last) - bisect_left(numbers, first) for first, last in pairwise(query_start_loc)]
    # Pairs of a row and a key, over all heads, the invisible ones included.
    pairs = heads * sum(own * (last - first) for own, (first, last) in zip(owned, pairwise(key_start_loc), strict=True))
    requests = sum(map(bool, owned))
    large = pairs >= requests * (workspace_elements(q.device) if q.is_cuda else _BLOCK_PAIRS)
    shared = k.shape[1] < heads and sum(owned) <= _SHARED_ROWS * requests
    if requests and large and not shared and not with_key_terms:
        low = low_precision(pairs, q.device)
        wanted = list(tiles.requests_of(q, k, v, query_start_loc, key_start_loc, causal, rows))
        state = _swept(wanted, (heads, v.shape[2]), scale, low, q.device)
        if state is not None:
            return state
    attend = partial(attention, scale=scale, causal=causal, with_terms=True, with_key_terms=with_key_terms)
    state = by_shape(attend, q, k, v, query_start_loc, key_start_loc)
    if rows is None:
        return state
    chosen = torch.tensor(rows, dtype=torch.long, device=q.device)
    return state.map(lambda x: x[chosen])


def _swept(
    requests: list[tiles.RequestRows], shape: tuple[int, int], scale: float, low: torch.dtype, device: torch.device
) -> AttentionState | None:
    """The state of all rows of all requests, panel by panel; None where operands are not finite.

    shape: heads N and width V of the output. low: precision of the error terms' products. Sums are of e^(s - shift),
    and need no running maximum: float64 holds any shift within 600 of it, low precision a product within e^±87.
    """
    count = sum(len(request.positions) for request in requests)
    # [N, T, 1] bounds of the scores of each row: |scale|·|q|·(the largest |k| of the request).
    bounds = torch.zeros(shape[0], count, 1, dtype=torch.float64, device=device)
    for request in requests:
        if request.k.shape[0]:
            product = abs(scale) * row_sums.norms(request.q) * row_sums.norms(request.k).amax(dim=0)
            bounds[:, request.rows] = product.mT.unsqueeze(-1)
    lengths = [row_sums.norms(request.v).amax().double() for request in requests if request.v.numel()]
    longest = torch.stack(lengths).amax() if lengths else torch.zeros((), dtype=torch.float64, device=device)
    finite = bounds.amax() + 0.0 * longest
    if not finite.is_cuda and not math.isfinite(finite):  # a GPU is asked at the end only, and has its work meanwhile
        return None
    state, columns = row_sums.empty_state(count, *shape, device), requests[0].k.shape[2]
    wide = tiles.score_dtype(requests[0].k, low).itemsize
    key_bytes = wide * columns + 8 * shape[1] + low.itemsize * (columns + 3 * shape[1])
    blocks = tiles.plan_blocks(device, heads=shape[0], key_bytes=key_bytes, pair_bytes=8 + 3 * low.itemsize)
    panels = [  # with counts made before the lanes, each of which has a stream of its own and waits for this one alone
        Panel(request, heads, rows, counts[rows], blocks, scale, low)
        for request, counts in ((request, request.counts()) for request in requests)
        for rows in tiles.cuts(len(request.positions), blocks.panel)
        for heads in tiles.cuts(shape[0], blocks.heads)
    ]
    shift = (bounds - row_sums.LARGEST_EXPONENT).clamp_(min=0.0)
    extremes = finite.repeat(len(panels) + 1, 2)  # the first stays, the others are written by the panels
    works = zip(panels, [shift[panel.heads, panel.at] for panel in panels], extremes[1:], strict=True)

    def fill(panel: Panel, shift: Tensor, reached: Tensor) -> Iterator[None]:
        """Write a panel's rows into the state, and its sums' extremes into a [2] float64; one tile a step."""
        sums = yield from panel.summed(shift)
        row_sums.store(sums, panel.low, state.map(lambda x: x[panel.at, panel.heads]))
        reached.copy_(panel.extremes(sums))

    tiles.in_lanes(device, [fill(*work) for work in works])
    (bound, _), *found = extremes.tolist()
    if not math.isfinite(bound):
        return None
    for panel, (least, most) in zip(panels, found, strict=True):
        if not (least >= row_sums.LEAST_SUM and math.isfinite(most)):
            tiles.in_lanes(device, [fill(panel, panel.maxima(), extremes[0])])
    return state


def low_precision(pairs: int, device: torch.device) -> torch.dtype:
    """Of the products that error terms are made of, for so many pairs of a query and a key over all heads."""
    return torch.bfloat16 if device.type == "cuda" and pairs >= _LOW_PRECISION_PAIRS else torch.float32


def by_shape(
    attend: partial[AttentionState], q: Tensor, k: Tensor, v: Tensor, query_start_loc: Starts, key_start_loc: Starts
) -> AttentionState:
    """What ``attend``, an `attention`, returns: requests of one shape are one of as many times the heads."""
    q, k, v = (x.double() if x.dtype.itemsize == 1 else x for x in (q, k, v))  # not every torch can pick rows of float8
    heads, workspace = q.shape[1], workspace_elements(q.device)
    states, order = list[AttentionState](), list[slice]()  # and the rows that they are of
    alike: dict[tuple[int, ...], list[tuple[slice, slice]]] = {}
    for request in zip(definition.segments(query_start_loc), definition.segments(key_start_loc), strict=True):
        alike.setdefault(tuple(rows.stop - rows.start for rows in request), []).append(request)
    for (q_len, kv_len), requests in alike.items():
        most = max(1, workspace // max(1, heads * (q_len * kv_len + (q_len + kv_len) * q.shape[2])))
        if k.shape[1] < heads and not q.is_cuda and heads * kv_len * q.shape[2] > _COPIED:
            most = 1  # their copies for each head take longer than so many operations
        for part in (requests[at : at + most] for at in range(0, len(requests), most)):
            order += [queries for queries, _ in part]
            if len(part) == 1:  # as it is, whose heads may share a key
                operands = [q[part[0][0]], k[part[0][1]], v[part[0][1]]]
            else:  # [count · tokens, N or 1, D] as [tokens, count · N, D]
                queries, keys = (
                    torch.cat([torch.arange(x.start, x.stop) for x in rows]) for rows in zip(*part, strict=True)
                )
                each = ((q, queries, q_len), (k, keys, kv_len), (v, keys, kv_len))
                picked = [
                    x[rows.to(x.device)].expand(-1, heads, -1).unflatten(0, (len(part), n)) for x, rows, n in each
                ]
                operands = [x.transpose(0, 1).flatten(1, 2) for x in picked]
            state = attend(*operands, query_start_loc=(0, q_len), key_start_loc=(0, kv_len))
            if len(part) > 1:
                state = state.map(lambda x: x.unflatten(1, (-1, heads)).transpose(0, 1).flatten(0, 1))
            states.append(state)
    state = definition.concatenate(states)
    if order == sorted(order, key=lambda rows: rows.start):
        return state
    place = torch.cat([torch.arange(rows.start, rows.stop) for rows in order]).argsort().to(q.device)
    return state.map(lambda x: x[place])
