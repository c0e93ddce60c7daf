"""The golden definition of the lightning indexer of DeepSeek-V3.2 and GLM-5, and of top-k of given logits.

score(t, s) = Σ_h w[t, h] · relu(q[t, h] · k[s]), for every token s of the row's request up to its own.
Sources: vLLM's ``sparse_attn_indexer`` and ``top_k_per_row_prefill``, DeepGEMM's ``fp8_mqa_logits``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.attention import Starts, segments, workspace_elements
from mla_conformance.reference.error_budget import FLOAT32_ROUNDOFF, Roundoffs

_SUMS = 2  # a score is a sum over heads of sums over columns


@dataclass(frozen=True)
class IndexScores:
    """Scores of n rows against the tokens of their requests, and what their errors are measured by."""

    scores: Tensor  # [n, W] float64 by position, -inf from a row's bound on
    magnitude: Tensor  # [n, W], Σ_h |w| · Σ_d |q| · |k|, magnitudes of everything that is added; 0 from there on
    bounds: Tensor  # [n] int64, tokens that a row may see

    @property
    def visible(self) -> Tensor:
        return torch.arange(self.scores.shape[1], device=self.bounds.device) < self.bounds.unsqueeze(1)

    def fewest(self, columns: int) -> Tensor:
        """[n] int64, tokens that a selection of so many columns names at least."""
        return self.bounds.clamp(max=columns)

    def budget(self, roundoffs: Roundoffs) -> Tensor:
        """[n, W] largest error of a faithful kernel: products are exact in float32, sums are not."""
        relative = _SUMS * roundoffs.accumulation * FLOAT32_ROUNDOFF + roundoffs.keys + roundoffs.scores
        return relative * self.magnitude


def index_scores(
    q: Tensor,  # [T, H, D]
    weights: Tensor,  # [T, H]
    k: Tensor,  # [S, D]; any float dtype
    *,
    query_start_loc: Starts,
    key_start_loc: Starts,  # a request without keys sees none
    rows: Sequence[int] | None = None,  # ascending query numbers; None for all
) -> IndexScores:
    """Scores of each query token for the tokens of its request up to its own, which is the last of as many."""
    if q.dim() != 3 or weights.shape != q.shape[:2] or k.dim() != 2 or k.shape[1] != q.shape[2]:
        shapes = f"{tuple(q.shape)}, {tuple(weights.shape)} and {tuple(k.shape)}"
        raise ValueError(f"expected q [T, H, D], weights [T, H] and k [S, D], got {shapes}")
    q = q.to(torch.float32) if q.dtype.itemsize == 1 else q  # float8 cannot be indexed everywhere
    chosen = torch.arange(len(q)) if rows is None else torch.tensor(rows, dtype=torch.long)
    # A row may see the tokens of its request without the queries behind it.
    batch = list(zip(segments(query_start_loc), segments(key_start_loc), strict=True))
    counts = [
        max(0, keys.stop - keys.start - queries.stop + row + 1)
        for queries, keys in batch
        for row in range(queries.start, queries.stop)
    ]
    bounds = torch.tensor(counts, dtype=torch.long)[chosen].to(q.device)
    scores = torch.full((len(chosen), int(bounds.max()) if len(bounds) else 0), -torch.inf, dtype=torch.float64)
    found = IndexScores(scores.to(q.device), torch.zeros_like(scores, device=q.device), bounds)
    for queries, keys in batch:
        own = ((chosen >= queries.start) & (chosen < queries.stop)).nonzero()[:, 0].to(q.device)
        key = k[keys].to(torch.float64)
        # So many rows at a time that their products with all keys fit the workspace.
        for part in own.split(max(1, workspace_elements(q.device) // (q.shape[1] * max(1, len(key))))):
            number = chosen.to(q.device)[part]
            query, weight = q[number].to(torch.float64), weights[number].to(torch.float64).unsqueeze(1)
            dots = (query.flatten(0, 1) @ key.mT).view(*query.shape[:2], len(key))
            found.scores[part, : len(key)] = (weight @ dots.clamp(min=0.0)).squeeze(1)
            # Σ_h |w| · Σ_d |q| · |k| = Σ_d (Σ_h |w| · |q|) · |k|.
            found.magnitude[part, : len(key)] = (weight.abs() @ query.abs()).squeeze(1) @ key.abs().mT
    found.scores.masked_fill_(~found.visible, -torch.inf)
    found.magnitude.masked_fill_(~found.visible, 0.0)
    return found


_FLUSHED = 2.0**-126  # below it processors flush subnormals to 0
_BEYOND = 1e300  # stands for infinity: larger than any logit, and finite, so that differences are numbers


@dataclass(frozen=True)
class WindowScores(IndexScores):
    """Logits of n rows by position in their windows; exact, so that the magnitude of what is added is 0."""

    unordered: Tensor  # [n] bool, rows that hold a NaN, of which no order is known

    def fewest(self, columns: int) -> Tensor:
        """[n] int64, columns that a selection names at least; of a row without an order it may leave out any."""
        return super().fewest(columns).masked_fill(self.unordered, 0)


def window_scores(logits: Tensor, lengths: Tensor, row_starts: Tensor | None = None) -> WindowScores:
    """The logits [n, C] of each row's window as scores, by lengths [n] and first columns [n], None for 0."""
    bounds, rows, columns = lengths.long(), *logits.shape
    starts = torch.zeros_like(bounds) if row_starts is None else row_starts.long()
    position = torch.arange(int(bounds.max()) if rows else 0, device=logits.device)
    visible = position < bounds.unsqueeze(1)
    column = (starts.unsqueeze(1) + position).clamp(max=max(0, columns - 1))
    values = logits.gather(1, column).double() if columns else logits.new_zeros(rows, 0, dtype=torch.float64)
    unordered = (values.isnan() & visible).any(dim=1)
    scores = values.masked_fill(values.abs() < _FLUSHED, 0.0).nan_to_num(0.0, _BEYOND, -_BEYOND)
    scores = scores.masked_fill(unordered.unsqueeze(1), 0.0).masked_fill(~visible, -torch.inf)
    return WindowScores(scores, torch.zeros_like(scores), bounds, unordered)
