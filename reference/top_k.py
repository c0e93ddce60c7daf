"""Top-k of given logits, row by row: the columns of a row's window, in the form in which an indexer's are judged.

A row sees the columns from its start on, as many as its length says; which of them hold the largest logits is exact,
and which of equal ones are taken is free. Sources: vLLM's ``top_k_per_row_prefill`` and ``top_k_per_row_decode``,
SGLang's ``fast_topk_v2``, FlashInfer's ``top_k``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.index_scores import IndexScores

_FLUSHED = 2.0**-126
_BEYOND = 1e300
"""Stands for infinity: larger than any logit, and finite, so that differences are numbers."""


@dataclass(frozen=True)
class WindowScores(IndexScores):
    """Logits of n rows by position in their windows; exact, so that the magnitude of what is added is 0.

    unordered: [n] bool, rows that hold a NaN, of which no order is known.
    """

    unordered: Tensor

    def fewest(self, columns: int) -> Tensor:
        """[n] int64, columns that a selection names at least; of a row without an order it may leave out any."""
        return super().fewest(columns).masked_fill(self.unordered, 0)


def window_scores(logits: Tensor, lengths: Tensor, row_starts: Tensor | None = None) -> WindowScores:
    """The logits of each row's window, as scores.

    logits: [n, C] of any float dtype; subnormals count as 0, since processors flush them. lengths: [n] integers.
    row_starts: [n] integers, the first column of each window; None for 0. Raises ValueError for a window that is not
    within the columns.
    """
    bounds, rows, columns = lengths.long(), *logits.shape
    starts = torch.zeros_like(bounds) if row_starts is None else row_starts.long()
    if bool((bounds < 0).any() | (starts < 0).any() | (starts + bounds > columns).any()):
        raise ValueError(f"expected windows within {columns} columns, got starts {starts} and lengths {bounds}")
    position = torch.arange(int(bounds.max()) if rows else 0, device=logits.device)
    visible = position < bounds.unsqueeze(1)
    column = (starts.unsqueeze(1) + position).clamp(max=max(0, columns - 1))
    values = logits.gather(1, column).double() if columns else logits.new_zeros(rows, 0, dtype=torch.float64)
    unordered = (values.isnan() & visible).any(dim=1)
    scores = values.masked_fill(values.abs() < _FLUSHED, 0.0).nan_to_num(0.0, _BEYOND, -_BEYOND)
    scores = scores.masked_fill(unordered.unsqueeze(1), 0.0).masked_fill(~visible, -torch.inf)
    return WindowScores(scores, torch.zeros_like(scores), bounds, unordered)
