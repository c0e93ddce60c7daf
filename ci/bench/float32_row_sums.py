"""The LSE of a row whose weights four threads add one by one in float32, as FlashAttention 2 does, against float64.

Usage: python ci/bench/float32_row_sums.py CASE REQUEST ROW HEAD; the last call of one request is looked at. Where
few logits differ, many additions share one rounding, and their errors add up instead of averaging out.
"""

import sys

import numpy as np
import torch

from mla_conformance.cases.case import Case
from mla_conformance.roles.table import build_problem

_TILE, _THREADS = 128, 4
_NEIGHBOURS = 2
"""Columns next to each other that a thread has of every eight, as a tensor core's accumulators lie."""


def main(name: str, request: int, row: int, head: int) -> None:
    """Print the LSE in float64, as such threads add it up, and what their difference is in units of 2^-24."""
    case = Case.parse(name)
    call = build_problem(case, torch.device("cpu"), "").attention[-1]
    first = call.key_start_loc[request]
    keys = call.k[first : call.key_start_loc[request + 1], head].double()
    scores = keys @ call.q[call.query_start_loc[request] + row, head].double() * case.softmax_scale
    exact, found = torch.logsumexp(scores, dim=0).item(), _added(scores.float().numpy())
    difference = (found - exact) * 2**24
    sys.stdout.write(f"{len(scores)} keys, {len(scores.unique())} logits that differ: {exact:.6f} in float64, ")
    sys.stdout.write(f"{found:.6f} as four threads add, {difference:.0f} × 2^-24 apart\n")


def _added(scores: np.ndarray) -> float:
    """Tiles from the last to the first, a running maximum, and sums that meet at the end."""
    sums, largest = np.zeros(_THREADS, np.float32), np.float32(scores[-1])
    for start in reversed(range(0, len(scores), _TILE)):
        tile = scores[start : start + _TILE]
        above = max(largest, tile.max())
        sums *= np.exp(largest - above)
        largest = above
        thread = np.arange(len(tile)) % (_THREADS * _NEIGHBOURS) // _NEIGHBOURS
        for weight, of in zip(np.exp(tile - largest), thread, strict=True):
            sums[of] += weight
    return float(largest) + float(np.log(float((sums[0] + sums[1]) + (sums[2] + sums[3]))))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
