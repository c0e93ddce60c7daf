"""The weights of `row_sums` as one kernel, for a GPU with Triton; the lines there say what it does."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from mla_conformance.reference.tiles import Tile

STEP = 32  # columns of queries and keys that are multiplied at a time; their number is a multiple of it
_ROWS = 64
_KEYS = 64


def weigh_on_gpu(tile: Tile, shift: Tensor, totals: Tensor, largest: Tensor, products: Tensor) -> Tensor:
    """Arguments and result as there, products with the magnitudes in the second place."""
    q, k, seen = tile.queries.wide, tile.keys.k, tile.seen
    heads, rows, width = q.shape
    keys = k.shape[1]
    weights = torch.empty(heads, rows, keys, dtype=torch.float64, device=q.device)
    whole = seen is None and rows % _ROWS == 0 and keys % _KEYS == 0
    of_rows = [(x, *x.stride()[:2]) for x in (totals, largest, shift)]
    with torch.cuda.device(q.device):
        _weigh[triton.cdiv(rows, _ROWS), heads](
            *(q, q.stride(0), k, k.stride(0), tile.queries.factor, seen),
            *(argument for x in of_rows for argument in x),
            *(weights, products, rows, keys),
            **{"WIDTH": width, "STEP": STEP, "ROWS": _ROWS, "KEYS": _KEYS, "WHOLE": whole},
            num_warps=4,
            num_stages=3,
        )
    return weights


_ANY_NUMBER = ("totals_head", "totals_row", "largest_head", "largest_row", "shift_head", "shift_row", "rows")
"""Arguments of which one more kernel would be compiled where they are 1, where 16 divides them, and elsewhere."""


@triton.jit(do_not_specialize=_ANY_NUMBER)
def _weigh(
    q,
    q_head,
    k,
    k_head,
    factor,
    seen,
    totals,
    totals_head,
    totals_row,
    largest,
    largest_head,
    largest_row,
    shift,
    shift_head,
    shift_row,
    weights,
    products,
    rows,
    keys,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Each program does ROWS rows of a head, KEYS keys at a time; WHOLE: all are there, and each row sees each key."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    column = tl.arange(0, STEP)
    inside = row < rows
    q += head * q_head
    k += head * k_head
    corner = (head * rows + first) * keys  # offsets within a tile stay in 32 bits: half the registers
    plane = tl.num_programs(1).to(tl.int64) * rows * keys
    at = tl.arange(0, ROWS)[:, None] * keys + key[None, :]
    limit = tl.zeros([ROWS], tl.int32) + keys if seen is None else tl.load(seen + row, mask=inside, other=0)
    total = tl.zeros([ROWS], tl.float64)
    weighted_total = tl.zeros([ROWS], tl.float64)
    most = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, keys, KEYS, flatten=True):
        scores = tl.zeros([ROWS, KEYS], tl.float64)
        present = None if WHOLE else inside[:, None] & (start + key < keys)[None, :]
        for step in range(0, WIDTH, STEP):
            query_at = q + step + row[:, None] * WIDTH + column[None, :]
            key_at = k + step + (start + key)[None, :] * WIDTH + column[:, None]
            a = tl.load(query_at) if WHOLE else tl.load(query_at, mask=inside[:, None], other=0.0)
            b = tl.load(key_at) if WHOLE else tl.load(key_at, mask=(start + key < keys)[None, :], other=0.0)
            scores = tl.dot(a.to(tl.float64), b.to(tl.float64), scores, out_dtype=tl.float64)
        if factor is not None:
            scores *= tl.load(factor)
        scores -= tl.load(shift + head * shift_head + row * shift_row, mask=inside, other=0.0)[:, None]
        if not WHOLE:
            scores = tl.where((start + key)[None, :] < limit[:, None], scores, float("-inf"))
        p = libdevice.exp(scores)
        low = p.to(tl.float32).to(tl.bfloat16)
        rounded = low.to(tl.float32)
        here = products + corner + start
        tl.store(weights + corner + start + at, p, mask=present)
        tl.store(here + at, low, mask=present)
        tl.store(here + 2 * plane + at, (rounded * rounded).to(tl.bfloat16), mask=present)
        magnitude = tl.load(here + plane + at) if WHOLE else tl.load(here + plane + at, mask=present, other=0.0)
        weighted = rounded * magnitude.to(tl.float32)
        tl.store(here + plane + at, weighted.to(tl.bfloat16), mask=present)
        total += tl.sum(p, 1)
        weighted_total += tl.sum(weighted, 1).to(tl.float64)
        most = tl.maximum(most, tl.max(rounded, 1))
    # A row outside that takes part nevertheless has scores of 0; nothing of it is written.
    sums = totals + head * totals_head + row * totals_row
    tl.store(sums, tl.load(sums, mask=inside) + total, mask=inside)
    tl.store(sums + 1, tl.load(sums + 1, mask=inside) + weighted_total, mask=inside)
    peaks = largest + head * largest_head + row * largest_row
    tl.store(peaks, tl.maximum(tl.load(peaks, mask=inside), most), mask=inside)
