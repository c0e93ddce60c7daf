"""Rows that do not attend to all tokens up to their own: to those of a list, of a window, or of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla_conformance.reference.attention import segments
from mla_conformance.reference.selected import NO_KEY


@dataclass(frozen=True)
class RowLists:
    """The tokens that the rows of a batch attend to.

    numbers: [T, K] int64, tokens of the row's request, counted from the first of its context; NO_KEY names none.
    query_start_loc: first row of each request, and the end.
    """

    numbers: Tensor
    query_start_loc: Sequence[int]

    @staticmethod
    def of(
        selected: Tensor | None, window: int | None, query_start_loc: Sequence[int], context_lens: Sequence[int]
    ) -> "RowLists | None":
        """What a selection [T, K] leaves of a window; None where neither is given.

        Raises ValueError for lists of another number of rows, not of integers, or with a token behind the row's own.
        """
        if selected is None and window is None:
            return None
        starts = zip(segments(query_start_loc), context_lens, strict=True)
        own = torch.cat([torch.arange(context, context + q.stop - q.start) for q, context in starts])[:, None]
        if selected is None:
            lists = (own - torch.arange(window)).clamp(min=NO_KEY)
        else:
            lists = _checked(selected, own)
            outside = lists <= own - window if window is not None else torch.zeros_like(lists, dtype=torch.bool)
            lists = lists.masked_fill(outside, NO_KEY)
        return RowLists(lists, query_start_loc)

    def keys(self, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[T, K] rows among the keys that hold tokens starts[b] … starts[b] + lengths[b] - 1 of each request b."""
        found = self.numbers.clone()
        for rows, start, length, key in zip(
            segments(self.query_start_loc), starts, lengths, accumulate(lengths, initial=0), strict=False
        ):
            local = self.numbers[rows] - start
            found[rows] = torch.where((local >= 0) & (local < length), local + key, NO_KEY)
        return found


def _checked(selected: Tensor, own: Tensor) -> Tensor:
    """The lists as int64."""
    if selected.dim() != 2 or len(selected) != len(own) or selected.is_floating_point():
        raise ValueError(
            f"expected a list of integers for each of {len(own)} rows, got {selected.dtype} {tuple(selected.shape)}"
        )
    wrong = (selected < NO_KEY) | (selected > own)
    if bool(wrong.any()):
        row = int(wrong.any(dim=1).nonzero()[0])
        raise ValueError(
            f"expected lists of tokens up to the row's own, or {NO_KEY}: row {row} sees 0 to {int(own[row])} and lists "
            f"{selected[row][wrong[row]].tolist()}"
        )
    return selected.long()
