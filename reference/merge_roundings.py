"""What storing partial states and their merges rounds, each rounding by the share that it has in the result.

A part that holds a share w of a row's weights is off by a roundoff of w·o, o its output; so is what several parts were
merged to before the others came. Which come first is free: from either end, the larger of both counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class MergeTerms:
    """Sums over the roundings of each element [T, N, V], in units of the roundoff: of sizes, and of squares."""

    total: Tensor
    squares: Tensor

    def larger(self, other: "MergeTerms") -> "MergeTerms":
        """Of two plans, whichever a kernel follows."""
        return MergeTerms(torch.maximum(self.total, other.total), torch.maximum(self.squares, other.squares))


def merged_parts(parts: Sequence[Tensor]) -> MergeTerms:
    """Of the shares [..., V] of a result that the chunks of a context have, in order, and the new tokens, the last."""
    own, first = torch.stack(tuple(parts)), torch.stack(tuple(parts)).cumsum(dim=0)
    whole, context = first[-1], first[-2]
    rounded = [own.abs()]
    if len(parts) > 2:
        between = first[:-2]
        ends = torch.stack((between.abs(), (context - between).abs(), (whole - between).abs()))
        rounded += [ends.amax(dim=0), context.abs().unsqueeze(0)]
    every = torch.cat(rounded)
    return MergeTerms(every.sum(dim=0), every.square().sum(dim=0))


def merged_states(outputs: Sequence[Tensor], lses: Sequence[Tensor], lse: Tensor) -> MergeTerms:
    """Of the states [T, N, V] and [N, T] of all chunks and of the new tokens, the last, whose merged LSE is ``lse``."""
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    return merged_parts([o * (part - seen).exp().mT.unsqueeze(-1) for o, part in zip(outputs, lses, strict=True)])


def merged_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    rows: Sequence[slice],
    keys: Sequence[slice],
    ends: Sequence[Sequence[int]],
    scale: float,
) -> MergeTerms:
    """Of a batch whose contexts are cut into chunks, which all rows of a request see.

    Args:
        q: [T, N, D], the judged queries.
        k: [S, N, D], the keys of each request, its context first.
        v: [S, N, V].
        output: [T, N, V], the golden one.
        lse: [N, T].
        rows: the judged rows of each request.
        keys: its keys.
        ends: where each chunk of its context ends, counted from its first key; none where nothing is merged.
        scale: factor of the logits.
    """
    total, squares = torch.zeros_like(output), torch.zeros_like(output)
    for own, seen, cuts in zip(rows, keys, ends, strict=True):
        if own.stop == own.start or not cuts:
            continue
        for head in range(output.shape[1]):
            shared = min(head, k.shape[1] - 1)
            mine = q[own, head].double(), k[seen, shared].double(), v[seen, shared].double()
            weights = ((mine[0] @ mine[1][: cuts[-1]].mT) * scale - lse[head, own].unsqueeze(1)).exp()
            parts = [weights[:, a:b] @ mine[2][a:b] for a, b in pairwise((0, *cuts))]
            found = merged_parts([*parts, output[own, head] - sum(parts)])
            total[own, head], squares[own, head] = found.total, found.squares
    return MergeTerms(total, squares)
