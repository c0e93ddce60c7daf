"""The error budget: how far a faithful low-precision kernel may be from the golden result, to first order.

Then what weights share that are rounded alike, and what storing partial states and their merges rounds. Equal keys have
equal logits in every kernel, and their weights one rounding; so have weights that are closer than 2u. Over these errors
add up instead of averaging out. Between weights that are spread evenly over 2u their sum is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, ErrorTerms

FLOAT32_ROUNDOFF = 2.0**-24
_LARGEST_SHIFT = 40.0  # scores that are off by more leave nothing of a weight to be judged; its budget stays finite


@dataclass(frozen=True, kw_only=True)
class Roundoffs:
    """Unit roundoffs of a kernel's intermediate results; 0 where it does not round."""

    p: float  # P before the product with V
    p_floor: float  # half the smallest subnormal of P, the absolute error of values tiny beside the row's largest
    partials: float  # outputs of split keys before they are combined
    output: float  # the stored output
    output_floor: float  # half the smallest subnormal of the stored output, the absolute error of tiny values
    row_sum: float  # P before it is summed, which moves the LSE
    exp: float  # the exponential, in P and in the row sum alike
    accumulation: float  # rounding steps of a float32 accumulation, in units of 2^-24 of the sum of magnitudes
    walk: float = 0.0  # those of P·v over all keys one after another, where they are more
    keys: float = 0.0  # keys that were stored as codes, and the values that they hold, after dequantisation
    scores: float = 0.0  # sums of q·k, beyond that, relative to the sum of magnitudes
    values: float = 0.0  # sums of P·v, beyond that, relative to the sum of magnitudes
    projections: float = 0.0  # keys and values, or absorbed query and attended latent, where projecting rounds
    values_floor: float = 0.0  # half the smallest subnormal of projected values, or of an attended latent
    latent_partials: float = 0.0  # latent outputs of split keys before they are combined, where projecting them rounds
    merges: float = 0.0  # stored parts and what they are merged to, each by its share in the result


# What both budgets of an output are made of: terms, floors, float32 and moved [T, N, V], and growth [T, N, 1].
Parts = tuple[ErrorTerms, Tensor, Tensor, Tensor, Tensor]


def budget_parts(state: AttentionState, roundoffs: Roundoffs) -> Parts:
    terms = state.terms
    if terms is None:
        raise ValueError("expected a state with error terms; compute it with with_terms=True")
    floors = roundoffs.p_floor * terms.peak + roundoffs.output_floor  # absolute errors of what is small
    if state.value_weights is not None:
        floors = floors + roundoffs.values_floor * state.value_weights
    lse_score = terms.lse_score.mT.unsqueeze(-1)
    by_lse = lse_score * state.output.abs()
    # What accumulating in float32 does: to the values, and to the scores. Their errors move the sum of P·v, or the sum
    # that it is divided by where the largest weight is of a value near 0.
    sums = max(roundoffs.accumulation, roundoffs.walk) * terms.magnitude
    float32 = FLOAT32_ROUNDOFF * (sums + roundoffs.accumulation * torch.maximum(terms.score, by_lse))
    # What scores do that are off by their sums of magnitudes: one off by d moves the output by p·d·(v - o). Both parts
    # count, since the errors may have any signs.
    moved = terms.score + by_lse
    # What scores that are off by up to d do, relative to d: (e^d - 1)·e^d / d, near 1 unless d is large. A weight off
    # by e^±d, over a sum that is off by as much, is off by (e^d - 1)·e^d of itself at most.
    off = roundoffs.keys + roundoffs.scores + roundoffs.projections
    if not off:
        return terms, floors, float32, moved, torch.ones_like(lse_score)
    d = (off * lse_score).clamp(max=_LARGEST_SHIFT)
    growth = d.exp() * torch.expm1(d) / d.clamp(min=torch.finfo(d.dtype).tiny)
    return terms, floors, float32, moved, torch.where(d > 0, growth, torch.ones_like(d))


def element_budget(state: AttentionState, roundoffs: Roundoffs, parts: Parts | None = None) -> Tensor:
    """[T, N, V] largest error of a faithful kernel, before rounding of the output is repeated by a consumer."""
    terms, floors, float32, moved, growth = parts or budget_parts(state, roundoffs)
    # P and the sum that normalises it are both off: twice exp; a sum of rounded P is off by up to row_sum.
    weights = (roundoffs.p + roundoffs.partials + roundoffs.row_sum + 2 * roundoffs.exp) * terms.magnitude
    moved = growth * moved
    rest = roundoffs.output * state.output.abs() + floors + float32
    if roundoffs.values or roundoffs.scores:
        rest = rest + (roundoffs.values * terms.magnitude + roundoffs.scores * moved)
    if state.merging is not None:
        rest = rest + roundoffs.merges * state.merging[0]
    if state.projected is None:
        return weights + rest + roundoffs.keys * (moved + terms.magnitude) if roundoffs.keys else weights + rest
    projected = state.projected
    keys = growth * (roundoffs.keys * projected.latent_rounding + roundoffs.projections * projected.rounding)
    float32 = roundoffs.accumulation * FLOAT32_ROUNDOFF * projected.accumulation
    return weights + rest + keys + float32 + roundoffs.latent_partials * projected.magnitude


def expected_row_rms(state: AttentionState, roundoffs: Roundoffs, parts: Parts | None = None) -> Tensor:
    """[T, N] RMS over the columns that independent uniform rounding errors of the same sizes would have."""
    terms, floors, float32, moved, growth = parts or budget_parts(state, roundoffs)
    projected = state.projected
    rounding = roundoffs.p**2 * terms.squares + roundoffs.output**2 * state.output.square()
    # Parts with weights w and outputs o have Σ w²·o² between the two: independent values, or values of one sign.
    if roundoffs.partials:
        rounding = rounding + roundoffs.partials**2 * (terms.squares + state.output.square())
    if state.merging is not None:
        rounding = rounding + roundoffs.merges**2 * state.merging[1]
    # What rounds alike for all keys adds up: a floor that swallows a tail, an exponential that is off everywhere.
    systematic = float32 + floors
    systematic = systematic + (roundoffs.row_sum + 2 * roundoffs.exp) * state.output.abs()
    if roundoffs.values:
        systematic = systematic + roundoffs.values * terms.magnitude
    if roundoffs.scores:
        systematic = systematic + roundoffs.scores * growth * moved
    if roundoffs.keys:
        if terms.key_spread is None or terms.key_shared is None or terms.key_shift is None:
            raise ValueError("expected a state with key terms; compute it with with_key_terms=True")
        # Equal codes are rounded alike: keys that resemble each other share roundings, and all may share a part.
        keys = terms.squares + terms.key_spread + terms.key_shared.unsqueeze(-1)
        keys = keys if projected is None else projected.latent_variance
        rounding = rounding + (roundoffs.keys * growth).square() * keys
        systematic = systematic + roundoffs.keys * growth * terms.key_shift
    if projected is not None:
        rounding = rounding + (roundoffs.projections * growth).square() * projected.variance
        rounding = rounding + roundoffs.latent_partials**2 * projected.latent_squares
        systematic = systematic + roundoffs.accumulation * FLOAT32_ROUNDOFF * projected.accumulation
    squares = (rounding / 3 + systematic.square()).mean(dim=-1)
    # In float32 the accumulation outweighs P. Weights that are equal in one row may be equal in all: no third of it.
    if state.shared is not None and roundoffs.p in P_ROUNDOFFS:
        squares = squares + roundoffs.p**2 * state.shared[..., P_ROUNDOFFS.index(roundoffs.p)]
    return squares.sqrt()


def rms_limit(samples: float, deviations: float) -> float:
    """Largest plausible RMS of ``samples`` independent errors over its expectation, so many ``deviations`` out."""
    # The root of a chi-square quantile over its degrees of freedom, by Wilson and Hilferty's cube (1931).
    spread = 2.0 / (9.0 * samples)
    return float((1.0 - spread + deviations * spread**0.5) ** 1.5)


def lse_budget(state: AttentionState, roundoffs: Roundoffs) -> Tensor:
    """[N, T] largest error of the LSE; 0 where the row sees no key."""
    assert state.terms is not None
    score = state.terms.lse_score
    float32 = score + state.lse.abs() + 1.0
    budget = roundoffs.accumulation * FLOAT32_ROUNDOFF * float32 + roundoffs.row_sum + roundoffs.exp
    budget = budget + (roundoffs.keys + roundoffs.scores) * score
    return budget.masked_fill(state.lse == -torch.inf, 0.0)


P_ROUNDOFFS = (2.0**-4, 2.0**-8, 2.0**-11)  # of e4m3, bfloat16 and float16
_FINER = (2.0**-14, 2.0**-17, 2.0**-20)
"""Values of opposite signs hide each other in a cell where a kernel rounds one up and the other down."""
_CELLS = 4  # cells of logits to a period of 2u
_COMBINATIONS = 16  # random combinations of columns that stand for all; fewer columns stand for themselves
_SAMPLED = 2  # rows, and heads of each, that show whether logits are that close: those that see most keys
_NOTEWORTHY = 0.5  # share of the variance of independent roundings from which that of shared ones is computed
_ELEMENTS = 2**22  # that the sums of some heads may take (32 MiB of float64); those of a single head always may
THREADS = 4  # that add the weights of a row in FlashAttention 2 and 3, each a pair of every eight, one after another
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
            last_place = FLOAT32_ROUNDOFF / THREADS * weights.sum(dim=-1, keepdim=True)
            cells = (weights / last_place).floor().sort(dim=-1).values
            # As many as share a cell with each: added up over all, Σ n_c².
            alike = torch.searchsorted(cells, cells, right=True) - torch.searchsorted(cells, cells)
            spread = deviations * (alike.sum(dim=-1, dtype=torch.float64) / 3).sqrt()
            parts.append((spread / len(keys)).clamp(max=1.0) * most_of_a_sum(len(keys)))
        found[heads, row] = torch.cat(parts)
    return found


def most_of_a_sum(keys: int) -> float:
    """The most that `running_sums` says of so many weights."""
    return FLOAT32_ROUNDOFF * keys / (2 * THREADS)


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


def merged_parts(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[..., V] each, sums over the roundings of each element, in units of the roundoff: of sizes, and of squares.

    Of the shares [..., V] of a result that the chunks of a context have, in order, and the new tokens, the last. One
    that holds a share w of a row's weights is off by a roundoff of w·o, o its output; so is what several were merged to
    before the others came. Which come first is free: from either end, the larger of both counts.
    """
    own, first = torch.stack(tuple(parts)), torch.stack(tuple(parts)).cumsum(dim=0)
    rounded = [own.abs()]
    if len(parts) > 2:
        whole, context, between = first[-1], first[-2], first[:-2]
        ends = torch.stack((between.abs(), (context - between).abs(), (whole - between).abs()))
        rounded += [ends.amax(dim=0), context.abs().unsqueeze(0)]
    every = torch.cat(rounded)
    return every.sum(dim=0), every.square().sum(dim=0)


def merged_states(outputs: Sequence[Tensor], lses: Sequence[Tensor], lse: Tensor) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor]:
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
            total[own, head], squares[own, head] = merged_parts([*parts, output[own, head] - sum(parts)])
    return total, squares
