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
  memory    on a GPU 8 bytes for the scores, 24 for the exponential and its products, 16 for reading them again.
On an H200 (59.7 TFLOP/s in float64, 4.8 TB/s) that is 10.7 + 1.5 ps of arithmetic and 10 ps of memory. PyTorch's
kernels, one after the other, take 7.9 for the scores, 6.2 for the exponential, 4.9 for p·v and 3.4 for the terms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, ErrorTerms, attention, check_operands
from mla_conformance.reference.blocks import LANES, cuts, in_lanes, plan_blocks
from mla_conformance.reference.panel import Panel
from mla_conformance.reference.row_sums import empty_state, store
from mla_conformance.reference.tiles import Keys
from mla_conformance.reference.visible import Request, requests_of

_LARGEST_EXPONENT = 32.0
"""Bound of s - c: squares of weights, summed over a million keys, stay below the end of float32's range."""
_LEAST_SUM = math.exp(-30.0)
"""Sums below it may have lost low-precision products to underflow."""
_LOW_PRECISION_PAIRS = 2**28
"""Pairs of a query and a key, over all heads, from which a GPU's error terms are bfloat16; float32 below."""
_BLOCK_PAIRS = 2**16
"""Pairs of a request from which blocks pay; smaller requests are one block of the definition."""


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
    made in bfloat16 and up to 3 % larger. Key terms are left to the definition. Raises ValueError as
    `attention` does, and for rows that are not ascending query numbers of the batch.
    """
    check_operands(q, k, v, query_start_loc, key_start_loc)
    _check_rows(rows, query_start_loc[-1])
    requests = list(requests_of(q, k, v, query_start_loc, key_start_loc, causal, rows))
    pairs = sum(request.pairs for request in requests)
    low = _low_precision(pairs, q.device) if with_terms else None
    sweep = _Sweep(requests, (q.shape[1], v.shape[2]), scale, low, q.device)
    pays = pairs >= _BLOCK_PAIRS * len(requests) > 0 and not with_key_terms
    state = sweep.state() if pays else None
    if state is None:
        state = attention(
            q,
            k,
            v,
            query_start_loc=query_start_loc,
            key_start_loc=key_start_loc,
            scale=scale,
            causal=causal,
            with_terms=with_terms,
            with_key_terms=with_key_terms,
        )
        return (
            state if rows is None else _part(state, torch.tensor(rows, dtype=torch.long, device=q.device), slice(None))
        )
    return state


@dataclass(frozen=True)
class _Sweep:
    """All rows of all requests, panel by panel.

    Attributes:
        requests: the rows and their keys.
        shape: heads N and width V of the output.
        scale: factor of the logits.
        low: precision of the error terms' products; None without error terms.
        device: where the operands are.
    """

    requests: list[Request]
    shape: tuple[int, int]
    scale: float
    low: torch.dtype | None
    device: torch.device

    def state(self) -> AttentionState | None:
        """The state of all rows; None where operands are not finite."""
        largest = self._largest_score()
        if not math.isfinite(largest):
            return None
        shift = None if largest <= _LARGEST_EXPONENT else (self._bounds() - _LARGEST_EXPONENT).clamp(min=0.0)
        state, panels = empty_state(self._rows, *self.shape, self.low is not None, self.device), self._panels()
        shifts = [None if shift is None else shift[panel.heads, panel.at] for panel in panels]
        found = [
            self._fill(state, panels[at : at + LANES], shifts[at : at + LANES]) for at in range(0, len(panels), LANES)
        ]
        # Asked at the end, since to answer the device must have done its work, and meanwhile nothing new is sent.
        for panel, (least, largest) in zip(panels, torch.cat(found).tolist(), strict=True):
            if not (least >= _LEAST_SUM and math.isfinite(largest)):
                self._fill(state, [panel], [panel.maxima()])
        return state

    def _fill(self, state: AttentionState, panels: Sequence[Panel], shifts: Sequence[Tensor | None]) -> Tensor:
        """Write the rows of some panels into the state; [panels, 2] their sums' extremes."""
        works = [(panel, panel.zeros(shift)) for panel, shift in zip(panels, shifts, strict=True)]
        in_lanes(self.device, [panel.add_to(sums) for panel, sums in works])
        # A margin, since terms must not be too small for the rounding of their products.
        margin = 1.0 if self.low is None else 1.0 + 2 * torch.finfo(self.low).eps
        for panel, sums in works:
            store(panel.own(sums), margin, _part(state, panel.at, panel.heads))
        return torch.stack([panel.extremes(sums) for panel, sums in works])

    @property
    def _rows(self) -> int:
        return sum(len(request.positions) for request in self.requests)

    def _largest_score(self) -> float:
        """A bound of all scores, |scale|·|q|·|k|; not finite where an operand is not."""
        largest = [_largest_norm([getattr(request, name) for request in self.requests]) for name in "qkv"]
        q, k, v = torch.stack(largest).tolist()
        return abs(self.scale) * q * k + 0.0 * v

    def _bounds(self) -> Tensor:
        """[N, T, 1] float64, bounds of the scores of each row: |scale|·|q|·(the largest |k| of the request)."""
        bounds = torch.zeros(self.shape[0], self._rows, 1, dtype=torch.float64, device=self.device)
        for request in self.requests:
            if request.k.shape[0]:
                product = abs(self.scale) * _norms(request.q) * _norms(request.k).amax(dim=0)
                bounds[:, request.rows] = product.mT.unsqueeze(-1)
        return bounds

    def _panels(self) -> list[Panel]:
        key_bytes = Keys.bytes_of_key(self.requests[0].k.shape[2], self.shape[1], self.low)
        pair_bytes = 8 if self.low is None else 8 + 3 * self.low.itemsize
        blocks = plan_blocks(self.device, heads=self.shape[0], key_bytes=key_bytes, pair_bytes=pair_bytes)
        return [
            Panel(request, heads, rows, blocks, self.scale, self.low)
            for request in self.requests
            for rows in cuts(len(request.positions), blocks.panel)
            for heads in cuts(self.shape[0], blocks.heads)
        ]


def _part(state: AttentionState, rows: slice | Tensor, heads: slice) -> AttentionState:
    """Some rows and heads; a view, if the rows are a slice and no numbers [r]."""
    terms = state.terms and ErrorTerms(
        **{name: x[heads, rows] if name == "lse_score" else x[rows, heads] for name, x in state.terms.by_name().items()}
    )
    return AttentionState(state.output[rows, heads], state.lse[heads, rows], terms)


def _largest_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The largest length of a row of any of them, float64; 0 without rows."""
    found = [_norms(x).amax().double() for x in tensors if x.numel()]
    return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float64, device=tensors[0].device)


def _norms(x: Tensor) -> Tensor:
    """[tokens, N] float32 lengths of rows of any float dtype; float64 of float64."""
    if x.dtype.itemsize == 1:
        x = x.to(torch.bfloat16)  # exact, and the norm knows no float8
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _low_precision(pairs: int, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" and pairs >= _LOW_PRECISION_PAIRS else torch.float32


def _check_rows(rows: Sequence[int] | None, stop: int) -> None:
    if rows is not None and not all(-1 < a < b for a, b in pairwise([*rows, stop])):
        raise ValueError(f"expected ascending query numbers from 0 to below {stop}, got {list(rows)}")
