"""Sums over keys that attention is made of, added up block by block, and the state that they end in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, ErrorTerms
from mla_conformance.reference.weights import Products, Totals, weigh


@dataclass(frozen=True)
class Values:
    """Values of a block's keys: v [h, c, V] float64; |v| and v² in low precision, or None without error terms."""

    v: Tensor
    absolute: Tensor | None
    squared: Tensor | None


@dataclass(frozen=True)
class TermSums:
    """What ErrorTerms are made of, heads first, float32, relative to e^shift as the weights are.

    magnitude, score, squares [N, T, V] and score_total [N, T, 1]: as in ErrorTerms. absolute [N, T, V]: Σ |v| of the
    visible keys. largest [N, T, 1]: the largest weight.
    """

    magnitude: Tensor
    score: Tensor
    squares: Tensor
    absolute: Tensor
    score_total: Tensor
    largest: Tensor

    def add(self, products: Products, values: Values) -> None:
        """Add a block's products; `absolute` needs no weights and is added elsewhere."""
        assert values.absolute is not None and values.squared is not None
        p, weighted, squared = products
        self.magnitude.add_(p @ values.absolute)
        self.score.add_(weighted @ values.absolute)
        self.squares.add_(squared @ values.squared)

    def terms(self, inverse: Tensor, margin: float) -> ErrorTerms:
        """The terms times ``margin``, given 1 / Σ p [N, T, 1]; the sums are overwritten."""
        factor = inverse * margin
        return ErrorTerms(
            magnitude=self.magnitude.mul_(factor).transpose(0, 1),
            score=self.score.mul_(factor).transpose(0, 1),
            squares=self.squares.mul_(factor * inverse).transpose(0, 1),
            peak=self.absolute.mul_(self.largest * factor).transpose(0, 1),
            lse_score=self.score_total.mul_(factor).squeeze(-1),
        )


@dataclass(frozen=True)
class RowSums:
    """Σ p·v [N, T, V] and Σ p [N, T, 1], float64, of weights p = e^(score - shift); shift [N, T, 1], or None for 0."""

    output: Tensor
    total: Tensor
    shift: Tensor | None
    terms: TermSums | None

    @staticmethod
    def zeros(
        heads: int, rows: int, width: int, shift: Tensor | None, with_terms: bool, device: torch.device
    ) -> "RowSums":
        """Nothing added yet."""

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(heads, rows, columns, dtype=dtype, device=device)

        columns = (width,) * 4 + (1, 1)
        terms = TermSums(*(zeros(count, torch.float32) for count in columns)) if with_terms else None
        return RowSums(zeros(width, torch.float64), zeros(1, torch.float64), shift, terms)

    def part(self, heads: slice, rows: slice) -> "RowSums":
        """A view of some heads and rows."""
        shift = None if self.shift is None else self.shift[heads, rows]
        terms = None if self.terms is None else TermSums(*(x[heads, rows] for x in vars(self.terms).values()))
        return RowSums(self.output[heads, rows], self.total[heads, rows], shift, terms)

    def add(self, scores: Tensor, magnitudes: Tensor | None, values: Values) -> None:
        """Add a block of keys with their scores and score magnitudes [h, r, c]; both are overwritten."""
        terms = self.terms
        totals = Totals(self.total) if terms is None else Totals(self.total, terms.largest, terms.score_total)
        products = weigh(scores, self.shift, magnitudes, totals)
        self.output.baddbmm_(scores, values.v)
        if terms is not None and products is not None:
            terms.add(products, values)

    def state(self, margin: float) -> AttentionState:
        """The state of the rows, error terms times ``margin``; the sums are overwritten."""
        inverse = torch.where(self.total > 0, 1 / self.total, 0.0)
        lse = self.total.log().squeeze(-1)
        return AttentionState(
            output=self.output.mul_(inverse).transpose(0, 1),
            lse=lse if self.shift is None else lse + self.shift.squeeze(-1),
            terms=None if self.terms is None else self.terms.terms(inverse, margin),
        )
