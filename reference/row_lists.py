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
        selected: Tensor | None,
        window: int | None,
        query_start_loc: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
    ) -> "RowLists | None":
        """What a window shows of a selection [T, K], or of all; None where neither is given.

        Raises ValueError for lists of another number of rows, not of integers, or with a token behind the row's own.
        """
        own = _own_numbers(query_start_loc, context_lens).to(device)
        if selected is not None:
            numbers = _checked(selected, own)
        elif window is not None:
            numbers = (own - torch.arange(window, device=device)).clamp(min=NO_KEY)
        else:
            return None
        if window is not None:
            numbers = numbers.masked_fill(numbers <= own - window, NO_KEY)
        return RowLists(numbers, query_start_loc)

    def keys(self, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """[T, K] rows among the keys that hold the lengths[b] tokens from starts[b] on of each request b."""
        found = self.numbers.clone()
        for rows, start, length, key in zip(
            segments(self.query_start_loc), starts, lengths, accumulate(lengths, initial=0), strict=False
        ):
            local = self.numbers[rows] - start
            found[rows] = torch.where((local >= 0) & (local < length), local + key, NO_KEY)
        return found


def _own_numbers(query_start_loc: Sequence[int], context_lens: Sequence[int]) -> Tensor:
    """[T, 1], the token that each row is."""
    requests = zip(segments(query_start_loc), context_lens, strict=True)
    return torch.cat([torch.arange(rows.stop - rows.start) + context for rows, context in requests]).unsqueeze(1)


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
