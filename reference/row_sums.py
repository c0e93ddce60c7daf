"""Sums over keys that attention is made of, added up tile by tile, and the state that they end in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, ErrorTerms
from mla_conformance.reference.tiles import Keys, LowKeys, View
from mla_conformance.reference.weights import Products, weigh, weigh_with_products

_NO_KEY = 1e-18
"""Stands for the Σ p of a row without keys; its square's inverse is within float32."""


@dataclass(frozen=True)
class TermSums:
    """What ErrorTerms are made of, heads first, float32, relative to e^shift as the weights are.

    magnitude, score, squares [h, r, V]: as in ErrorTerms. absolute [h, r, V]: Σ |v| of the visible keys.
    largest [h, r, 1]: the largest weight.
    """

    magnitude: Tensor
    score: Tensor
    squares: Tensor
    absolute: Tensor
    largest: Tensor

    def add(self, products: Products, keys: LowKeys) -> None:
        """Add a tile."""
        p, weighted, squared = products
        _accumulate(self.magnitude, p, keys.v)
        _accumulate(self.score, weighted, keys.v)
        _accumulate(self.squares, squared, keys.squared)


@dataclass(frozen=True)
class RowSums:
    """Sums of weights p = e^(score - shift), heads first.

    Attributes:
        output: [h, r, V] float64, Σ p·v.
        totals: [h, r, 1] float64, Σ p; with error terms [h, r, 2], Σ p and Σ p·magnitude.
        shift: [h, r, 1] float64, or None for 0.
        terms: sums of the error terms, or None.
    """

    output: Tensor
    totals: Tensor
    shift: Tensor | None
    terms: TermSums | None

    @staticmethod
    def zeros(shape: torch.Size, shift: Tensor | None, with_terms: bool, device: torch.device) -> "RowSums":
        """Nothing added yet; shape: (h, r, V)."""

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape[:2], columns, dtype=dtype, device=device)

        columns = (shape[2],) * 4 + (1,)
        terms = TermSums(*(zeros(count, torch.float32) for count in columns)) if with_terms else None
        return RowSums(zeros(shape[2], torch.float64), zeros(1 + with_terms, torch.float64), shift, terms)

    def map(self, view: View) -> "RowSums":
        """The view of each part."""
        shift = None if self.shift is None else view(self.shift)
        terms = self.terms and TermSums(*(view(part) for part in vars(self.terms).values()))
        return RowSums(view(self.output), view(self.totals), shift, terms)

    def add(self, scores: Tensor, magnitudes: Tensor | None, keys: Keys) -> None:
        """Add a tile's keys with scores and score magnitudes [h, r, c], which are overwritten."""
        if self.shift is not None:
            scores.sub_(self.shift)
        if self.terms is None or magnitudes is None or keys.low is None:
            weigh(scores, self.totals)
        else:
            self.terms.add(weigh_with_products(scores, magnitudes, self.totals, self.terms.largest), keys.low)
        self.output.baddbmm_(scores, keys.v)

    def set_absolute(self, absolute: Tensor) -> None:
        """Set Σ |v| of the visible keys, which takes no weights."""
        assert self.terms is not None
        self.terms.absolute.copy_(absolute)

    def extremes(self) -> Tensor:
        """[2] float64: the least Σ p of a row, and the largest sum of the error terms, not finite beyond its range."""
        largest = self.totals.amax() if self.terms is None else self.terms.squares.amax().double()
        return torch.stack((self.totals[..., 0].amin(), largest))


def empty_state(rows: int, heads: int, width: int, with_terms: bool, device: torch.device) -> AttentionState:
    """A state of T rows, N heads and V = ``width`` columns to store sums in; its error terms are float32."""
    shapes = [(rows, heads, width)] * 4 + [(heads, rows)]
    terms = ErrorTerms(*(torch.empty(shape, device=device) for shape in shapes)) if with_terms else None
    output = torch.empty(shapes[0], dtype=torch.float64, device=device)
    return AttentionState(output, output.new_empty(shapes[-1]), terms)


def store(sums: RowSums, margin: float, state: AttentionState) -> None:
    """Write the state that the sums end in, error terms times ``margin``; state: of the r rows and h heads."""
    total = sums.totals[..., :1]
    inverse = total.clamp(min=_NO_KEY).reciprocal_()
    torch.mul(sums.output, inverse, out=state.output.transpose(0, 1))
    lse = total.log().squeeze(-1)
    state.lse.copy_(lse if sums.shift is None else lse + sums.shift.squeeze(-1))
    if sums.terms is not None and state.terms is not None:
        factor, terms = (inverse * margin).float(), sums.terms
        written = (
            (terms.magnitude, factor, state.terms.magnitude),
            (terms.score, factor, state.terms.score),
            (terms.squares, (inverse.square() * margin).float(), state.terms.squares),
            (terms.absolute, terms.largest * factor, state.terms.peak),
        )
        for term, factor_of_row, target in written:
            torch.mul(term, factor_of_row, out=target.transpose(0, 1))
        state.terms.lse_score.copy_((sums.totals[..., 1:] * inverse * margin).squeeze(-1))


def _accumulate(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to float32 sums; on a GPU without rounding the product to the operands' dtype."""
    if sums.is_cuda:
        torch.baddbmm(sums, a, b, out_dtype=sums.dtype, out=sums)
    else:
        sums.add_(a @ b)
