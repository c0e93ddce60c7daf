"""The error budget: how far a faithful low-precision kernel may be from the golden result, to first order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference import attention, roundings

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
Parts = tuple[attention.ErrorTerms, Tensor, Tensor, Tensor, Tensor]


def budget_parts(state: attention.AttentionState, roundoffs: Roundoffs) -> Parts:
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


def element_budget(state: attention.AttentionState, roundoffs: Roundoffs, parts: Parts | None = None) -> Tensor:
    """[T, N, V] largest error of a faithful kernel, before rounding of the output is repeated by a consumer."""
    terms, floors, float32, moved, growth = parts or budget_parts(state, roundoffs)
    # P and the sum that normalises it are both off: twice exp; a sum of rounded P is off by up to row_sum.
    weights = (roundoffs.p + roundoffs.partials + roundoffs.row_sum + 2 * roundoffs.exp) * terms.magnitude
    moved = growth * moved
    rest = roundoffs.output * state.output.abs() + floors + float32
    if roundoffs.values or roundoffs.scores:
        rest = rest + (roundoffs.values * terms.magnitude + roundoffs.scores * moved)
    if state.merging is not None:
        rest = rest + roundoffs.merges * state.merging.total
    if state.projected is None:
        return weights + rest + roundoffs.keys * (moved + terms.magnitude) if roundoffs.keys else weights + rest
    projected = state.projected
    keys = growth * (roundoffs.keys * projected.latent_rounding + roundoffs.projections * projected.rounding)
    float32 = roundoffs.accumulation * FLOAT32_ROUNDOFF * projected.accumulation
    return weights + rest + keys + float32 + roundoffs.latent_partials * projected.magnitude


def expected_row_rms(state: attention.AttentionState, roundoffs: Roundoffs, parts: Parts | None = None) -> Tensor:
    """[T, N] RMS over the columns that independent uniform rounding errors of the same sizes would have."""
    terms, floors, float32, moved, growth = parts or budget_parts(state, roundoffs)
    projected = state.projected
    rounding = roundoffs.p**2 * terms.squares + roundoffs.output**2 * state.output.square()
    # Parts with weights w and outputs o have Σ w²·o² between the two: independent values, or values of one sign.
    if roundoffs.partials:
        rounding = rounding + roundoffs.partials**2 * (terms.squares + state.output.square())
    if state.merging is not None:
        rounding = rounding + roundoffs.merges**2 * state.merging.squares
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
    if state.shared is not None and roundoffs.p in roundings.P_ROUNDOFFS:
        squares = squares + roundoffs.p**2 * state.shared[..., roundings.P_ROUNDOFFS.index(roundoffs.p)]
    return squares.sqrt()


def rms_limit(samples: float, deviations: float) -> float:
    """Largest plausible RMS of ``samples`` independent errors over its expectation, so many ``deviations`` out."""
    # The root of a chi-square quantile over its degrees of freedom, by Wilson and Hilferty's cube (1931).
    spread = 2.0 / (9.0 * samples)
    return float((1.0 - spread + deviations * spread**0.5) ** 1.5)


def lse_budget(state: attention.AttentionState, roundoffs: Roundoffs) -> Tensor:
    """[N, T] largest error of the LSE; 0 where the row sees no key."""
    assert state.terms is not None
    score = state.terms.lse_score
    float32 = score + state.lse.abs() + 1.0
    budget = roundoffs.accumulation * FLOAT32_ROUNDOFF * float32 + roundoffs.row_sum + roundoffs.exp
    budget = budget + (roundoffs.keys + roundoffs.scores) * score
    return budget.masked_fill(state.lse == -torch.inf, 0.0)
