"""What every result is judged by, in this order: exceptions and form, its numbers, what else the calls wrote."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.foreign import type_name
from mla_conformance.driving.driver import Instead, Observation, Returned, is_tensor, parts_of, why_not_plain
from mla_conformance.judging.diagnosis import TRANSPOSED, Position, extent
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.record import BudgetUse, Check, Status, Verdict, failed
from mla_conformance.judging.tolerance import Tolerance
from mla_conformance.problems.calls import Problem
from mla_conformance.reference.indexer import IndexScores
from mla_conformance.reference.quantization import e4m3_ordinal

Form = list[tuple[str, torch.Size, torch.dtype]]  # what each tensor of a result is called, its shape and its dtype


@dataclass(frozen=True)
class Measured:
    got: torch.Tensor  # what was returned, float64; e4m3 codes by their place in the order of codes
    golden: torch.Tensor  # what is expected, in the same form; -inf where the LSE of a row without keys is
    allowed: torch.Tensor  # error that rounding may leave in ``got``, which is as large as it is wrong

    @staticmethod
    def of_codes(got: torch.Tensor, low: torch.Tensor, golden: torch.Tensor, high: torch.Tensor) -> "Measured":
        not_a_number = got.double().isnan()
        codes = got.view(torch.uint8).masked_fill(not_a_number, 0).view(got.dtype)
        places = e4m3_ordinal(codes).double().masked_fill(not_a_number, torch.nan)
        return Measured(places, golden, torch.maximum(high - golden, golden - low))


class Steps:
    writes: ClassVar[Check] = Check.CACHE  # the check of what a call writes beside its result
    writes_first: ClassVar[bool] = False  # whether that is looked at before the numbers

    def __init__(self, problem: Problem, expectation: Golden, declaration: Declaration, numbers: Tolerance) -> None:
        self.problem, self.rows, self.expectation = problem, expectation.rows, expectation
        self.case: Any = problem.case
        self.declaration, self.numbers = declaration, numbers
        self.used, self.inconclusive = BudgetUse(), 0

    def verdict(self, observation: Observation) -> Verdict:
        found = next(filter(None, self._steps(observation)), None)
        found = found or Verdict(Status.PASS, used=self.used, inconclusive=self.inconclusive)
        if self.rows.numbers is None:
            return found
        sampled = {"rows": len(self.rows.numbers), "of": self.rows.query_start_loc[-1], "drawn": self.rows.drawn}
        return replace(found, sampled=sampled)

    def measured(self, observation: Observation) -> Iterator[Measured]:
        """The numbers that were returned, as far as they can be compared; of an observation whose form is right."""
        return iter(())

    def _expected_form(self, returned: Returned) -> Form:
        """What a call has to return; nothing where its result is what it wrote, whatever it returns."""
        return []

    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        """Failures of the numbers, None for each step that holds; of a call that only writes there are none."""
        return iter(())

    def _steps(self, observation: Observation) -> Iterator[Verdict | None]:
        yield from map(self.form, observation.returned)
        wrong = [(returned.call.name, returned.miswritten) for returned in observation.returned if returned.miswritten]
        miswritten = [failed(self.writes, f"{name}: {what}") for name, what in wrong]
        yield from miswritten if self.writes_first else ()
        yield from self._numbers(observation)
        for returned in observation.returned:
            if returned.out is None:
                continue
            output, name = parts_of(returned.value)[0], returned.call.name
            if output.untyped_storage().data_ptr() != returned.out.storage.untyped_storage().data_ptr():
                yield failed(Check.OUT_TENSOR, f"{name}: the result does not share the storage of out=")
            elif overrun := returned.out.overrun():
                yield failed(Check.OUT_OF_BOUNDS_WRITE, f"{name}: {overrun} bytes around out= were overwritten")
        yield from miswritten
        if observation.mutated:
            yield failed(Check.MUTATED_INPUT, f"the call changed {', '.join(observation.mutated)}")
        if observation.disturbed:
            yield failed(Check.PROCESS_STATE, f"the call changed the process: {'; '.join(observation.disturbed)}")

    def form(self, returned: Returned) -> Verdict | None:
        name = returned.call.name
        if returned.error and returned.out_of_memory:
            return Verdict(Status.UNAVAILABLE, f"{name}: out of memory: {returned.error}")
        if returned.error:
            return replace(failed(Check.CALL, f"{name}: the call raised {returned.error}"), detail=returned.traceback)
        expected, values = self._expected_form(returned), parts_of(returned.value)
        if not expected:
            return None
        if len(expected) == 1 and issubclass(type(returned.value), tuple | list):
            what = f"a {type_name(returned.value)} of {len(values)}"
            return failed(Check.SHAPE, f"{name}: expected the {expected[0][0]} itself, got {what}")
        if len(values) != len(expected) or not all(map(is_tensor, values)):
            got = ", ".join(each.kind if type(each) is Instead else type_name(each) for each in values)
            return failed(Check.SHAPE, f"{name}: expected {len(expected)} tensor(s), got ({got})")
        for (what, shape, dtype), value in zip(expected, values, strict=True):
            if instead := why_not_plain(value):
                return failed(Check.SHAPE, f"{name}: expected a strided torch.Tensor as {what}, got {instead}")
            if value.shape != shape:
                wrong = failed(Check.SHAPE, f"{name}: expected {what} of shape {list(shape)}, got {list(value.shape)}")
                transposed = what == "LSE" and list(value.shape) == list(shape)[::-1]
                return replace(wrong, finding=TRANSPOSED if transposed else "")
            if value.dtype != dtype:
                return failed(Check.DTYPE, f"{name}: expected {what} of {dtype}, got {value.dtype}")
            if value.device != self.problem.device:
                return failed(Check.DEVICE, f"{name}: expected {what} on {self.problem.device}, got {value.device}")
        return None


def share_of(error: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Error over allowance; no error over no allowance, as in a row without keys, is 0."""
    return (error / allowed).nan_to_num(nan=0.0, posinf=torch.inf)


def worst_of(share: torch.Tensor) -> float:
    return float(share.max()) if share.numel() else 0.0


NOTHING = -2  # the position of what is no token of the row


class SelectionSteps(Steps):
    """Each number names a token that its row sees, once, and none better is left out.

    An indexer knows each score up to its budget: it may leave out a better token if the two could have changed places.
    """

    def _selection(
        self, name: str, numbers: torch.Tensor, positions: torch.Tensor, golden: IndexScores, budget: torch.Tensor
    ) -> Iterator[Verdict | None]:
        for reason, wrong in _wrong_tokens(numbers, positions, golden):
            yield self._misnamed(name, reason, wrong)
        if not golden.scores.numel():
            return
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
        if self.used.element > 1:
            row = int(share.argmax())
            out, inside = int(left[row]), int(best[row])
            yield self._wrong(
                f"{name}: token {out} with score {golden.scores[row, out]:.5g} is left out for token {inside} with "
                f"{golden.scores[row, inside]:.5g} at {self._at(row)}: {share[row]:.3g} × the error budget of both",
                share > 1,
            )

    def _misnamed(self, name: str, reason: Callable[[int], str], wrong: torch.Tensor) -> Verdict | None:
        if not bool(wrong.any()):
            return None
        row = int(wrong.nonzero()[0])
        verdict = self._wrong(f"{name}: {reason(row)}, at {self._at(row)}", wrong, Check.SELECTION)
        return replace(verdict, used=BudgetUse())

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

    def first(values: torch.Tensor, wrong: torch.Tensor, row: int) -> int:
        return int(values[row][wrong[row]][0])

    foreign, bounds = positions == NOTHING, golden.bounds
    yield lambda row: f"{first(numbers, foreign, row)} is no token of the request", foreign.any(dim=1)
    late = positions >= bounds.unsqueeze(1)
    below = "is selected, expected those below"
    yield lambda row: f"token {first(positions, late, row)} {below} {int(bounds[row])}", late.any(dim=1)
    ordered = positions.sort(dim=1).values
    twice = torch.zeros_like(late)
    twice[:, 1:] = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    yield lambda row: f"token {first(ordered, twice, row)} is selected twice", twice.any(dim=1)
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
