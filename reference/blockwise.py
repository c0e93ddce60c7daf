"""Golden attention in blocks: the values of `attention`, within a bounded workspace and near the machine's speed.

The keys that a row sees are the first so many of its request, so causal, unmasked and sampled rows are one algorithm,
which `panel` cuts into products without waste but for a narrow edge.

A sum of e^(s - c) needs no running maximum: float64 holds any c within 600 of it. Error terms are sums of positive
products, for which two digits do; they are made of low-precision copies on the matrix units, whose exponents reach
e^±87. c comes from |s| <= |scale|·|q|·|k|; where the sums show that this was too far off, a panel is done again with
the exact maximum. Operands that are not finite, and batches of small requests, are left to the definition.

The floor, for each pair of a query and a visible key, of D = P + R and V columns:
  float64   2D + 2V operations (640 for R1's dims) and one exponential;
  terms     2D + 6V operations in low precision (1152);
  memory    on a GPU 8 bytes for the weight, 8 for the magnitude and the products, and as many for reading them again.
On an H200 (59.7 TFLOP/s in float64, 4.8 TB/s) that is 10.7 + 1.5 ps of arithmetic and 7 ps of memory. The kernel of
scores and weights takes 11.8 ps there, p·v 4.7, magnitudes 1.1 and the terms' products 2.0, one after the other.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mla_conformance.reference.attention import (
    AttentionState,
    attention,
    check_operands,
    concatenate,
    segments,
    workspace_elements,
)
from mla_conformance.reference.panel import Panel
from mla_conformance.reference.row_sums import LARGEST_EXPONENT, LEAST_SUM, empty_state, norms, store
from mla_conformance.reference.tiles import RequestRows, TileKeys, cuts, in_lanes, plan_blocks, requests_of

_LOW_PRECISION_PAIRS = 2**28
"""Pairs of a query and a key, over all heads, from which a GPU's error terms are bfloat16; float32 below."""
_BLOCK_PAIRS = 2**16
"""Pairs of a request from which blocks pay; smaller requests are one block of the definition. On a GPU, which waits for
its next small operation, those are that fit the definition's workspace."""
_SHARED_ROWS = 32
"""Rows of a request up to which keys that its heads share stay with the definition; blocks copy them for each head."""


def blockwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
    scale: float,
    causal: bool,
    with_terms: bool = False,
    with_key_terms: bool = False,
    rows: Sequence[int] | None = None,
) -> AttentionState:
    """What `attention` returns for the same arguments, or of it the rows ``rows`` (ascending query numbers).

    Output and LSE agree with it to float64 rounding. Error terms are float32; of large problems on a GPU they are
    made in bfloat16 and up to 5 % larger. Key terms are left to the definition. Raises ValueError as
    `attention` does, and for rows that are not ascending query numbers of the batch.
    """
    check_operands(q, k, v, query_start_loc, key_start_loc)
    stop, heads = query_start_loc[-1], q.shape[1]
    if rows is not None and not all(-1 < a < b for a, b in pairwise([*rows, stop])):
        raise ValueError(f"expected ascending query numbers from 0 to below {stop}, got {list(rows)}")
    owned = [last - first for first, last in pairwise(query_start_loc)]
    if rows is not None:
        owned = [bisect_left(rows, last) - bisect_left(rows, first) for first, last in pairwise(query_start_loc)]
    # Pairs of a row and a key, over all heads, the invisible ones included.
    pairs = heads * sum(own * (last - first) for own, (first, last) in zip(owned, pairwise(key_start_loc), strict=True))
    requests = sum(map(bool, owned))
    large = pairs >= requests * (workspace_elements(q.device) if q.is_cuda else _BLOCK_PAIRS)
    shared = k.shape[1] < heads and sum(owned) <= _SHARED_ROWS * requests
    if requests and large and not shared and not with_key_terms:
        low = low_precision(pairs, q.device) if with_terms else None
        wanted = list(requests_of(q, k, v, query_start_loc, key_start_loc, causal, rows))
        state = _swept(wanted, (heads, v.shape[2]), scale, low, q.device)
        if state is not None:
            return state
    attend = partial(attention, scale=scale, causal=causal, with_terms=with_terms, with_key_terms=with_key_terms)
    state = by_shape(attend, q, k, v, query_start_loc, key_start_loc)
    if rows is None:
        return state
    chosen = torch.tensor(rows, dtype=torch.long, device=q.device)
    return state.map(lambda x: x[chosen])


def _swept(
    requests: list[RequestRows], shape: tuple[int, int], scale: float, low: torch.dtype | None, device: torch.device
) -> AttentionState | None:
    """The state of all rows of all requests, panel by panel; None where operands are not finite.

    shape: heads N and width V of the output. low: precision of the error terms' products; None without error terms.
    """
    count = sum(len(request.positions) for request in requests)
    # [N, T, 1] bounds of the scores of each row: |scale|·|q|·(the largest |k| of the request).
    bounds = torch.zeros(shape[0], count, 1, dtype=torch.float64, device=device)
    for request in requests:
        if request.k.shape[0]:
            product = abs(scale) * norms(request.q) * norms(request.k).amax(dim=0)
            bounds[:, request.rows] = product.mT.unsqueeze(-1)
    lengths = [norms(request.v).amax().double() for request in requests if request.v.numel()]
    longest = torch.stack(lengths).amax() if lengths else torch.zeros((), dtype=torch.float64, device=device)
    finite = bounds.amax() + 0.0 * longest
    # A GPU is asked at the end only, and given its work meanwhile.
    if not finite.is_cuda and not math.isfinite(finite):
        return None
    state = empty_state(count, *shape, low is not None, device)
    key_bytes, pair_bytes = TileKeys.bytes_of_key(requests[0], low), 8 if low is None else 8 + 3 * low.itemsize
    blocks = plan_blocks(device, heads=shape[0], key_bytes=key_bytes, pair_bytes=pair_bytes)
    # Counts are made here, before the lanes, each of which has a stream of its own and waits for this one alone.
    panels = [
        Panel(request, heads, rows, counts[rows], blocks, scale, low)
        for request, counts in ((request, request.counts()) for request in requests)
        for rows in cuts(len(request.positions), blocks.panel)
        for heads in cuts(shape[0], blocks.heads)
    ]
    # What the scores are taken relative to; None for 0.
    is_shifted = bounds.is_cuda or bool(bounds.amax() > LARGEST_EXPONENT)
    shift = (bounds - LARGEST_EXPONENT).clamp_(min=0.0) if is_shifted else None
    shifts = [None if shift is None else shift[panel.heads, panel.at] for panel in panels]
    extremes = finite.repeat(len(panels) + 1, 2)  # the first stays, the others are written by the panels
    in_lanes(device, [_filled(state, *work, low) for work in zip(panels, shifts, extremes[1:], strict=True)])
    (bound, _), *found = extremes.tolist()
    if not math.isfinite(bound):
        return None
    for panel, (least, most) in zip(panels, found, strict=True):
        if not (least >= LEAST_SUM and math.isfinite(most)):
            in_lanes(device, [_filled(state, panel, panel.maxima(), extremes[0], low)])
    return state


def _filled(
    state: AttentionState, panel: Panel, shift: Tensor | None, extremes: Tensor, low: torch.dtype | None
) -> Iterator[None]:
    """Write a panel's rows into the state, and its sums' extremes into a [2] float64; one tile a step."""
    sums = panel.zeros(shift)
    yield from panel.add_to(sums)
    store(panel.own(sums), low, state.map(lambda x: x[panel.at, panel.heads]))
    extremes.copy_(panel.extremes(sums))


def low_precision(pairs: int, device: torch.device) -> torch.dtype:
    """Of the products that error terms are made of, for so many pairs of a query and a key over all heads."""
    return torch.bfloat16 if device.type == "cuda" and pairs >= _LOW_PRECISION_PAIRS else torch.float32


def by_shape(
    attend: Callable[..., AttentionState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
) -> AttentionState:
    """What ``attend``, which is `attention` with all its other arguments, returns for a batch.

    Requests of one shape are one request of as many times the heads: attention knows no other heads, and a batch of
    thousands of small requests, one after the other, is slow everywhere, above all on a GPU that others use as well.
    To float64 rounding; for a request unlike all others exactly. Raises ValueError as `attention` does.
    """
    check_operands(q, k, v, query_start_loc, key_start_loc)
    q, k, v = (x.double() if x.dtype.itemsize == 1 else x for x in (q, k, v))  # not every torch can pick rows of float8
    heads, states, order, workspace = q.shape[1], [], [], workspace_elements(q.device)
    alike: dict[tuple[int, ...], list[tuple[slice, slice]]] = {}
    for request in zip(segments(query_start_loc), segments(key_start_loc), strict=True):
        alike.setdefault(tuple(rows.stop - rows.start for rows in request), []).append(request)
    for (q_len, kv_len), requests in alike.items():
        most = max(1, workspace // max(1, heads * (q_len * kv_len + (q_len + kv_len) * q.shape[2])))
        for part in (requests[at : at + most] for at in range(0, len(requests), most)):
            queries, keys = (
                torch.cat([torch.arange(x.start, x.stop) for x in rows]) for rows in zip(*part, strict=True)
            )
            order.append(queries)
            if len(part) == 1:  # as it is, whose heads may share a key
                operands = [q[part[0][0]], k[part[0][1]], v[part[0][1]]]
            else:  # [count · tokens, N or 1, D] as [tokens, count · N, D]
                each = ((q, queries, q_len), (k, keys, kv_len), (v, keys, kv_len))
                picked = [
                    x[rows.to(x.device)].expand(-1, heads, -1).unflatten(0, (len(part), n)) for x, rows, n in each
                ]
                operands = [x.transpose(0, 1).flatten(1, 2) for x in picked]
            state = attend(*operands, query_start_loc=(0, q_len), key_start_loc=(0, kv_len))
            if len(part) > 1:
                state = state.map(lambda x: x.unflatten(1, (-1, heads)).transpose(0, 1).flatten(0, 1))
            states.append(state)
    state, place = concatenate(states), torch.cat(order).argsort().to(q.device)
    return state if len(alike) == 1 else state.map(lambda x: x[place])
