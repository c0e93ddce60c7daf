"""What a failure looks like: closed-form suspects, compared with what the backend returned."""

import math
from typing import Any

import torch

from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.problems.operands import segments

_CLOSE = 1e-3
_LSE_FACTORS = {1 / math.log(2): "base 2, expected natural log", math.log(2): "converted from base 2 once too often"}


def explain_lse(rows: JudgedRows, lse: torch.Tensor, golden: torch.Tensor) -> str:
    """A sentence for a wrong LSE [N, T] whose cause its values give away; empty if none fits."""
    for request, row in enumerate(segments(rows.start_loc)):
        got, want = lse[:, row], golden[:, row]
        seen = want.isfinite() & (want.abs() > 0.1)
        if not bool(seen.any()):
            continue
        ratio = float((got[seen] / want[seen]).median())
        for factor, what in _LSE_FACTORS.items():
            if bool(((got[seen] - factor * want[seen]).abs() <= _CLOSE * want[seen].abs() + _CLOSE).all()):
                return f"LSE of request {request} is {ratio:.4f} × the golden value: {what}"
    if lse.shape[0] == lse.shape[1] and torch.allclose(lse.mT, golden, atol=_CLOSE, rtol=_CLOSE):
        return "LSE is transposed, expected [heads, tokens]"
    return ""


def explain_mask(part: Any) -> str:
    """A hint for an output that is not finite."""
    untouched = part.whole.isnan().all(dim=-1).all(dim=-1)
    if bool(untouched.any()):
        return f"; {int(untouched.sum())} of {len(untouched)} rows hold nothing but NaN, as if never written"
    return ""


def explain_output(output: torch.Tensor, golden: torch.Tensor) -> str:
    """A hint for a wrong output [T, N, V]; empty if none fits."""
    if not bool(output.any()):
        return "; the whole output is 0"
    heads = golden.shape[1]
    for shift in range(1, heads):
        if torch.allclose(output, golden.roll(shift, dims=1), atol=1e-2, rtol=1e-2):
            return f"; heads are rotated by {shift}"
    return ""
