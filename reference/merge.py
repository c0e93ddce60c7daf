"""Merging attention over disjoint sets of keys into attention over their union.

With natural-log LSEs l1, l2 and outputs o1, o2, the union has l = ln(e^l1 + e^l2) and
o = e^(l1-l)·o1 + e^(l2-l)·o2. A row that saw no key (l = -inf) carries no information: whatever its output holds, NaN
included, is ignored, and two of them merge to output 0 and LSE -inf.
"""

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """The state over the union of the keys of `a` and `b`, which saw the same queries and disjoint keys.

    Error terms are dropped: a bound for the union is made of the union's own. ValueError when the shapes
    differ.
    """
    return AttentionState(*merge(a.output, a.lse, b.output, b.lse))


def merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial results: outputs [T, N, V] and natural-log LSEs [N, T] of any float dtype.

    Returns (output [T, N, V], lse [N, T]), float64. Raises ValueError when the shapes do not fit together.
    """
    _check_rows(output_a, lse_a, output_b, lse_b)
    lse_a, lse_b = lse_a.to(torch.float64), lse_b.to(torch.float64)
    lse = torch.logaddexp(lse_a, lse_b)
    return _contribution(output_a, lse_a, lse) + _contribution(output_b, lse_b, lse), lse


def _contribution(x: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """e^(part - whole)·x, for x [T, N, V] and LSEs [N, T]; exactly 0 where the part is empty, whatever x holds."""
    empty = part == -torch.inf
    share = torch.exp(part - whole).masked_fill(empty, 0.0)
    return (_column(share) * x.to(torch.float64)).masked_fill(_column(empty), 0.0)


def _column(rows: Tensor) -> Tensor:
    """[N, T] to [T, N, 1], so that it scales rows of [T, N, V]."""
    return rows.mT.unsqueeze(-1)


def _check_rows(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> None:
    """Raise ValueError unless the outputs are [T, N, V] and both LSEs [N, T]."""
    rows = output_a.shape[1::-1]
    if output_a.dim() != 3 or output_a.shape != output_b.shape or lse_a.shape != rows or lse_b.shape != rows:
        raise ValueError(
            "expected two outputs [T, N, V] and two LSEs [N, T] of the same T and N, got outputs "
            f"{tuple(output_a.shape)} and {tuple(output_b.shape)}, LSEs {tuple(lse_a.shape)} and "
            f"{tuple(lse_b.shape)}; both partial results must come from the same queries"
        )
