"""`weigh_with_products` as one kernel, for a GPU with Triton; the lines there say what it does."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_ROWS = 4
_WIDTH = 512


def weigh_on_gpu(scores: Tensor, magnitudes: Tensor, totals: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and result as there, magnitudes in bfloat16; scores and magnitudes contiguous."""
    heads, rows, keys = scores.shape
    low, squared = torch.empty_like(magnitudes), torch.empty_like(magnitudes)
    grid = (triton.cdiv(rows, _ROWS), heads)
    sums = (totals, largest, totals.stride(0), totals.stride(1), largest.stride(0), largest.stride(1))
    with torch.cuda.device(scores.device):
        _weigh[grid](scores, magnitudes, low, squared, *sums, rows, keys, WIDTH=_WIDTH, ROWS=_ROWS)
    return low, magnitudes, squared


@triton.jit
def _weigh(
    scores,
    magnitudes,
    low,
    squared,
    totals,
    largest,
    totals_head,
    totals_row,
    largest_head,
    largest_row,
    rows,
    keys,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program does ROWS rows of a head, WIDTH keys at a time."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    total = tl.zeros([ROWS], tl.float64)
    weighted_total = tl.zeros([ROWS], tl.float64)
    most = tl.zeros([ROWS], tl.float32)
    for start in range(0, keys, WIDTH):
        key = start + tl.arange(0, WIDTH)
        at = (head * rows + row[:, None]) * keys + key[None, :]
        present = inside[:, None] & (key < keys)[None, :]
        p = libdevice.exp(tl.load(scores + at, mask=present, other=float("-inf")))
        p_low = p.to(tl.bfloat16).to(tl.float32)
        weighted = (p_low * tl.load(magnitudes + at, mask=present, other=0.0).to(tl.float32)).to(tl.bfloat16)
        tl.store(scores + at, p, mask=present)
        tl.store(low + at, p_low.to(tl.bfloat16), mask=present)
        tl.store(magnitudes + at, weighted, mask=present)
        tl.store(squared + at, (p_low * p_low).to(tl.bfloat16), mask=present)
        total += tl.sum(p, 1)
        weighted_total += tl.sum(weighted.to(tl.float64), 1)
        most = tl.maximum(most, tl.max(p_low, 1))
    sums = totals + head * totals_head + row * totals_row
    tl.store(sums, tl.load(sums, mask=inside) + total, mask=inside)
    tl.store(sums + 1, tl.load(sums + 1, mask=inside) + weighted_total, mask=inside)
    peaks = largest + head * largest_head + row * largest_row
    tl.store(peaks, tl.maximum(tl.load(peaks, mask=inside), most), mask=inside)
