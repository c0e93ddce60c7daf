"""What weights share that are rounded alike, and what storing partial states and their merges rounds.

Equal keys have equal logits in every kernel, and their weights one rounding; so have weights that are closer than 2u.
Over these errors add up instead of averaging out. Between weights that are spread evenly over 2u their sum is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

P_ROUNDOFFS = (2.0**-4, 2.0**-8, 2.0**-11)  # of e4m3, bfloat16 and float16
_FINER = (2.0**-14, 2.0**-17, 2.0**-20)
"""Values of opposite signs hide each other in a cell where a kernel rounds one up and the other down."""
_CELLS = 4  # cells of logits to a period of 2u
_COMBINATIONS = 16  # random combinations of columns that stand for all; fewer columns stand for themselves
_SAMPLED = 2  # rows, and heads of each, that show whether logits are that close: those that see most keys
_NOTEWORTHY = 0.5  # share of the variance of independent roundings from which that of shared ones is computed
_ELEMENTS = 2**22  # that the sums of some heads may take (32 MiB of float64); those of a single head always may
THREADS = 4  # that add the weights of a row in FlashAttention 2 and 3, each a pair of every eight, one after another
_SUM_ROUNDOFF = 2.0**-24
_MOST_PAIRS = 2**25  # of a query and a key, over all heads, that are looked at; of more some rows stand for others

Visible = Sequence[slice | Tensor]  # the keys of each row


def shared_roundings(q: Tensor, k: Tensor, v: Tensor, visible: Visible, ends: Sequence[int], scale: float) -> Tensor:
    """[T, N, 3] float64, what independent roundings of P leave out, averaged over the columns, by `P_ROUNDOFFS`.

    Σ_c |Σ p·v|² over cells c of logits u/2 wide, less a quarter of the same over 2u and less what Σ p²·v² counts, at
    least 0; estimated from random combinations of the columns. 0 for all, where the longest rows, among the last of
    each request, ``ends``, show that few logits are as close as that.
    """
    found = torch.zeros(*q.shape[:2], len(P_ROUNDOFFS), dtype=torch.float64, device=q.device)
    shown, heads = [], slice(None, None, -(-q.shape[1] // _SAMPLED))
    for row in sorted(ends, key=lambda row: _count(visible[row]))[-_SAMPLED:]:
        logits = _logits(q[row][heads], k[visible[row]], scale, heads)
        p = logits.softmax(dim=-1)
        alone = p.square().sum(dim=-1, keepdim=True)
        shown.append((_pairs(logits, p.unsqueeze(-1), P_ROUNDOFFS) > _NOTEWORTHY * alone).any(dim=-1))
    # By half of them: of a few keys two may be close by chance.
    if not shown or 2 * int(torch.cat(shown).sum()) < sum(map(len, shown)):
        return found
    # Random combinations of columns, whose squared sums are on average those of the columns.
    combined, width, sizes = v.double(), v.shape[-1], (*P_ROUNDOFFS, *_FINER)
    if width <= _COMBINATIONS:
        combined = combined * width**-0.5
    else:
        drawn = torch.randint(0, 2, (width, _COMBINATIONS), generator=torch.Generator().manual_seed(0))
        combined = combined @ (drawn.to(combined) * 2 - 1) * (width * _COMBINATIONS) ** -0.5
    every = 1 + q.shape[1] * sum(map(_count, visible)) // _MOST_PAIRS
    for row, seen in list(enumerate(visible))[::every]:
        logits = _logits(q[row], k[seen], scale)
        weighted = logits.softmax(dim=-1).unsqueeze(-1) * combined[seen].transpose(0, 1)
        step = max(1, _ELEMENTS // (len(sizes) * _bins(logits.shape[-1]) * weighted.shape[-1]))
        parts = [_pairs(*part, sizes) for part in zip(logits.split(step), weighted.split(step), strict=True)]
        largest = torch.cat(parts).clamp(min=0.0).flip(-1).cummax(dim=-1).values.flip(-1)
        found[row : row + every] = largest[:, : len(P_ROUNDOFFS)]
    return found


def running_sums(q: Tensor, k: Tensor, visible: Visible, wanted: Tensor, scale: float, deviations: float) -> Tensor:
    """[N, T] float64, how far a row's sum of weights may be off, relatively, if threads add one by one in float32.

    Each addition is off by u of a sum that grows evenly, by u/2 of its end on average. Weights that are as close as the
    sum's last place share one rounding, so that its errors add up; those of others are independent and uniform. With
    n_c weights in cell c that is u·√(Σ n_c² / 3) / (2·`THREADS`) in standard deviation, of which so many count, and
    never more than if all were alike: u·S / (2·`THREADS`). Rows that are not ``wanted``, [N, T] bool, are 0.
    """
    found = torch.zeros(wanted.shape, dtype=torch.float64, device=q.device)
    for row in wanted.any(dim=0).nonzero()[:, 0].tolist():
        heads, keys = wanted[:, row], k[visible[row]]
        every = _logits(q[row][heads], keys, scale, heads).exp()
        parts = []
        for weights in every.split(max(1, _ELEMENTS // every.shape[1])):
            last_place = _SUM_ROUNDOFF / THREADS * weights.sum(dim=-1, keepdim=True)
            cells = (weights / last_place).floor().sort(dim=-1).values
            # As many as share a cell with each: added up over all, Σ n_c².
            alike = torch.searchsorted(cells, cells, right=True) - torch.searchsorted(cells, cells)
            spread = deviations * (alike.sum(dim=-1, dtype=torch.float64) / 3).sqrt()
            parts.append((spread / len(keys)).clamp(max=1.0) * most_of_a_sum(len(keys)))
        found[heads, row] = torch.cat(parts)
    return found


def most_of_a_sum(keys: int) -> float:
    """The most that `running_sums` says of so many weights."""
    return _SUM_ROUNDOFF * keys / (2 * THREADS)


def _count(keys: slice | Tensor) -> int:
    return keys.stop - keys.start if isinstance(keys, slice) else len(keys)


def _logits(q: Tensor, k: Tensor, scale: float, heads: slice | Tensor = slice(None)) -> Tensor:
    """[N, S] float64, relative to the largest of each head; of some heads, whose queries are given."""
    q, k = q.double(), (k if k.shape[1] == 1 else k[:, heads]).double()
    products = (k[:, 0] @ q.mT).mT if k.shape[1] == 1 else (k.transpose(0, 1) @ q.unsqueeze(-1)).squeeze(-1)
    scores = scale * products.contiguous()
    return scores - scores.amax(dim=-1, keepdim=True) if k.shape[0] else scores


def _bins(keys: int) -> int:
    return max(256, 1 << keys.bit_length())


def _pairs(logits: Tensor, weighted: Tensor, roundoffs: Sequence[float]) -> Tensor:
    """[N, R] sums over cells and columns by roundoff, for logits [N, S] and weighted values [N, S, C]."""
    heads, columns, bins = len(logits), weighted.shape[-1], _bins(logits.shape[-1])
    to_cells = logits.new_tensor([_CELLS / (2 * roundoff) for roundoff in roundoffs])
    cell = (logits.unsqueeze(1) * to_cells.unsqueeze(1) + 0.5).floor().long() % bins
    place = cell.flatten(0, 1) + bins * torch.arange(heads * len(to_cells), device=cell.device).unsqueeze(1)
    sums = weighted.new_zeros(heads * len(to_cells) * bins, columns)
    # Not scattered, which on a GPU adds up in any order.
    values = weighted.unsqueeze(1).expand(-1, len(to_cells), -1, -1).reshape(-1, columns)
    sums.index_put_((place.flatten(),), values, accumulate=True)
    cells = sums.view(heads, len(to_cells), -1, _CELLS, columns)
    even = cells.sum(dim=3).square().sum(dim=(2, 3))
    alone = weighted.square().sum(dim=(1, 2)).unsqueeze(1)
    return cells.square().sum(dim=(2, 3, 4)) - alone + (alone - even) / _CELLS


@dataclass(frozen=True)
class MergeTerms:
    """Sums over the roundings of each element [T, N, V], in units of the roundoff: of sizes, and of squares.

    A part that holds a share w of a row's weights is off by a roundoff of w·o, o its output; so is what several parts
    were merged to before the others came. Which come first is free: from either end, the larger of both counts.
    """

    total: Tensor
    squares: Tensor

    def larger(self, other: "MergeTerms") -> "MergeTerms":
        return MergeTerms(torch.maximum(self.total, other.total), torch.maximum(self.squares, other.squares))


def merged_parts(parts: Sequence[Tensor]) -> MergeTerms:
    """Of the shares [..., V] of a result that the chunks of a context have, in order, and the new tokens, the last."""
    own, first = torch.stack(tuple(parts)), torch.stack(tuple(parts)).cumsum(dim=0)
    rounded = [own.abs()]
    if len(parts) > 2:
        whole, context, between = first[-1], first[-2], first[:-2]
        ends = torch.stack((between.abs(), (context - between).abs(), (whole - between).abs()))
        rounded += [ends.amax(dim=0), context.abs().unsqueeze(0)]
    every = torch.cat(rounded)
    return MergeTerms(every.sum(dim=0), every.square().sum(dim=0))


def merged_states(outputs: Sequence[Tensor], lses: Sequence[Tensor], lse: Tensor) -> MergeTerms:
    """Of the states [T, N, V] and [N, T] of all chunks and of the new tokens, the last, whose merged LSE is ``lse``."""
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    return merged_parts([o * (part - seen).exp().mT.unsqueeze(-1) for o, part in zip(outputs, lses, strict=True)])


def merged_chunks(
    q: Tensor,  # [T, N, D], the judged queries
    k: Tensor,  # [S, N, D], the keys of each request, its context first
    v: Tensor,  # [S, N, V]
    output: Tensor,  # [T, N, V], the golden one
    lse: Tensor,  # [N, T]
    *,
    rows: Sequence[slice],  # the judged rows of each request
    keys: Sequence[slice],  # its keys
    # where each chunk of its context ends, counted from its first key; none where nothing is merged
    ends: Sequence[Sequence[int]],
    scale: float,  # factor of the logits
) -> MergeTerms:
    """Of a batch whose contexts are cut into chunks, which all rows of a request see."""
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
