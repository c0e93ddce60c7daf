"""Judging what was selected: each number names a token that its row sees, once, and none better is left out.

An indexer knows each score up to its budget: it may leave out a better token if the two could have changed places.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from mla_conformance.judging.diagnosis import Position, extent
from mla_conformance.judging.steps import Measured, Steps, share_of, worst_of
from mla_conformance.judging.verdict import BudgetUse, Check, Verdict, failed
from mla_conformance.reference.index_scores import IndexScores

NOTHING = -2  # the position of what is no token of the row


class SelectionSteps(Steps):
    def _selection(
        self, name: str, numbers: torch.Tensor, positions: torch.Tensor, golden: IndexScores, budget: torch.Tensor
    ) -> Iterator[Verdict | None]:
        for reason, wrong in _wrong_tokens(numbers, positions, golden):
            yield self._misnamed(name, reason, wrong)
        yield self._margin(name, positions, golden, budget)

    def _misnamed(self, name: str, reason: Callable[[int], str], wrong: torch.Tensor) -> Verdict | None:
        if not bool(wrong.any()):
            return None
        row = int(wrong.nonzero()[0])
        verdict = self._wrong(f"{name}: {reason(row)}, at {self._at(row)}", wrong, Check.SELECTION)
        return replace(verdict, used=BudgetUse())

    def _margin(self, name: str, positions: torch.Tensor, golden: IndexScores, budget: torch.Tensor) -> Verdict | None:
        """No token that was left out may be better than a selected one, unless the two could have changed places."""
        if not golden.scores.numel():
            return None
        chosen = torch.zeros_like(golden.visible)
        rows, columns = (positions >= 0).nonzero().unbind(1)
        chosen[rows, positions[rows, columns]] = True
        best = (golden.scores + budget).masked_fill(~chosen, torch.inf).argmin(dim=1, keepdim=True)
        left = (golden.scores - budget).masked_fill(chosen | ~golden.visible, -torch.inf).argmax(dim=1, keepdim=True)
        compared = chosen.any(dim=1) & (golden.visible & ~chosen).any(dim=1)
        gap = golden.scores.gather(1, left) - golden.scores.gather(1, best)
        allowed = budget.gather(1, left) + budget.gather(1, best)
        share = share_of(gap.clamp(min=0.0), allowed)[:, 0].masked_fill(~compared, 0.0)
        self.used = replace(self.used, element=max(self.used.element, worst_of(share)))
        if self.used.element <= 1:
            return None
        row = int(share.argmax())
        out, inside = int(left[row]), int(best[row])
        return self._wrong(
            f"{name}: token {out} with score {golden.scores[row, out]:.5g} is left out for token {inside} with "
            f"{golden.scores[row, inside]:.5g} at {self._at(row)}: {share[row]:.3g} × the error budget of both",
            share > 1,
        )

    def _wrong(self, message: str, wrong: torch.Tensor, check: Check = Check.SCORE) -> Verdict:
        place = Position.of(self.rows, [int(wrong.nonzero()[0]), 0])
        where = {"request": place.request, "query": place.position}
        return failed(check, f"{message}, {extent(self.rows, wrong)}", where, self.used)

    def _at(self, row: int) -> str:
        return Position.of(self.rows, [row, 0]).row_name


def _wrong_tokens(
    numbers: torch.Tensor, positions: torch.Tensor, golden: IndexScores
) -> Iterator[tuple[Callable[[int], str], torch.Tensor]]:
    """What may be wrong, as a clause about a row and the rows [n] bool of which it is true."""
    foreign, bounds = positions == NOTHING, golden.bounds
    yield lambda row: f"{_first(numbers, foreign, row)} is no token of the request", foreign.any(dim=1)
    late = positions >= bounds.unsqueeze(1)
    yield (
        lambda row: f"token {_first(positions, late, row)} is selected, expected those below {int(bounds[row])}",
        late.any(dim=1),
    )
    ordered = positions.sort(dim=1).values
    twice = torch.zeros_like(late)
    twice[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    yield lambda row: f"token {_first(ordered, twice, row)} is selected twice", twice.any(dim=1)
    got, want = (positions >= 0).sum(dim=1), golden.fewest(positions.shape[1])
    yield (
        lambda row: f"{int(got[row])} tokens are selected, expected {int(want[row])} of {int(bounds[row])}",
        got < want,  # more than there are would be late or twice
    )


def selected(positions: torch.Tensor, golden: IndexScores, budget: torch.Tensor) -> Measured:
    """How often each row selected each token [n, W], then anything else; expected are the best by their golden scores.

    What may change places with the last of the best, by the scores' budget [n, W], may be selected or not.
    """
    width = golden.scores.shape[1]
    counted = positions.where((positions >= 0) & (positions < width), width)
    got = torch.zeros(len(positions), width + 1, dtype=torch.float64, device=positions.device)
    got.scatter_add_(1, counted, torch.ones_like(counted, dtype=torch.float64))
    best = golden.scores.topk(min(positions.shape[1], width), dim=1)
    wanted = torch.zeros_like(got).scatter_(1, best.indices, best.values.isfinite().double())
    wanted[:, width] = positions.shape[1] - wanted.sum(dim=1)
    if not best.values.numel():
        return Measured(got, wanted, torch.zeros_like(got))
    near = (golden.scores - best.values[:, -1:]).abs() <= budget + budget.gather(1, best.indices[:, -1:])
    return Measured(got, wanted, torch.nn.functional.pad(near.double(), (0, 1)))


def _first(values: torch.Tensor, wrong: torch.Tensor, row: int) -> int:
    return int(values[row][wrong[row]][0])
