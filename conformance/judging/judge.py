"""The judge of attention: masks → LSE → output, within the steps that every result is judged by (SPEC 4.1).

Every row and head of the LSE and every element of the output is compared; the first check that fails decides.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.driving.driver import Observation, Returned, parts_of
from mla_conformance.judging.diagnosis import (
    Position,
    common_factor,
    explain_lse,
    explain_mask,
    explain_output,
    extent,
    worst_position,
)
from mla_conformance.judging.golden import Budget, GoldenAttention, of_running_sums, with_shared
from mla_conformance.judging.judged_rows import JudgedRows
from mla_conformance.judging.measured import Compared, Measured
from mla_conformance.judging.steps import Form, Steps, share_of, worst_of
from mla_conformance.judging.tolerance import Merged, Tolerance, roundoffs
from mla_conformance.judging.verdict import ZERO, BudgetUse, Check, Verdict, failed
from mla_conformance.problems.calls import AttentionCall, attention_call
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.error_budget import Roundoffs, expected_row_rms, rms_limit
from mla_conformance.reference.quantization import dequantize_e4m3, e4m3_ordinal, quantize_e4m3
from mla_conformance.reference.roundings import most_of_a_sum


@dataclass(frozen=True)
class _Part:
    """One result to be judged: of a call, or of all calls merged."""

    name: str  # how messages call it
    keys: int  # keys of the request that has most
    golden: AttentionState  # the golden state
    whole: torch.Tensor  # [T, N, V], the output of all rows; of any float dtype
    output: torch.Tensor  # [rows, N, V], of the judged rows
    lse: torch.Tensor | None  # [N, rows], or None if it was not asked for
    merged: Merged | None  # how it was merged, if it was
    call: int | None  # the number of the call; None for all calls merged


class AttentionJudge(Steps):
    def __init__(
        self, problem: Problem, expectation: GoldenAttention, declaration: Declaration, numbers: Tolerance
    ) -> None:
        super().__init__(problem, expectation)
        self.expectation, self.declaration, self.numbers = expectation, declaration, numbers

    def measured(self, observation: Observation) -> Iterator[Measured]:
        for part in (*self._called(observation), *self._merged(observation)):
            budget = self._budget(part)
            if self.problem.output_scale is None:
                element = budget.element * self.numbers.element_limit
                yield Measured.of_output(part.output, part.golden.output, element)
            else:
                yield Measured.of_codes(part.output, *self._allowed_codes(part, budget))
            if part.lse is not None:
                yield Measured.of_lse(part.lse, part.golden.lse, budget.lse * self.numbers.lse_limit)

    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        for part in self._called(observation):
            yield from self._values(part)
        if observation.merge_error:
            yield failed(Check.CALL, f"merge_attn_states raised {observation.merge_error}")
        for part in self._merged(observation):
            yield from self._values(part)

    def _called(self, observation: Observation) -> Iterator[_Part]:
        for number, (returned, golden) in enumerate(zip(observation.returned, self.expectation.calls, strict=True)):
            call, (output, *lse) = attention_call(returned.call), parts_of(returned.value)
            merged = Merged(call.merges, stored=True) if call.merges else None
            part = self._picked(call.name, [call], golden, output, lse[0] if lse else None, merged)
            yield replace(part, call=number)

    def _merged(self, observation: Observation) -> Iterator[_Part]:
        """What all calls together gave, where there is something to merge."""
        calls, golden = self.problem.attention, self.expectation.merged
        if golden is not None and observation.merged is not None:
            merged = Merged(merges=len(calls) - 1, stored=self.problem.case.own_merge)
            name = "all parts merged in place" if self.problem.case.merges_in_place else "all parts merged"
            yield self._picked(name, calls, golden, *observation.merged, merged)

    def _picked(
        self,
        name: str,
        calls: Sequence[AttentionCall],
        golden: AttentionState,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        merged: Merged | None,
    ) -> _Part:
        keys = max(map(sum, zip(*(call.key_lens for call in calls), strict=True)))
        whole, judged = output[: self.rows.total], self.rows.pick(output)
        picked = None if lse is None else self.rows.pick(lse, dim=1)
        return _Part(name, keys, golden, whole, judged, picked, merged, call=None)

    def _expected_form(self, returned: Returned) -> Form:
        call = attention_call(returned.call)
        dtype = self.problem.output_dtype if returned.out is None else returned.out.view.dtype
        form = [("output", torch.Size(call.result_shape), dtype)]
        if call.returns_lse:
            form.append(("LSE", torch.Size((self.problem.case.heads, call.q.shape[0])), torch.float32))
        return form

    def _values(self, part: _Part) -> Iterator[Verdict | None]:
        found = self._compared(part)
        yield self._mask(part, found)
        if part.lse is not None:
            yield self._lse(part, found)
        if wrong := self._stored(part, found):
            yield wrong if part.lse is None else _beside(wrong, "the LSE is right")

    def _compared(self, part: _Part) -> Compared:
        budget, output, whole = self._budget(part), part.output.double(), part.whole
        infinite = ~(whole.double() if whole.dtype.itemsize == 1 else whole).isfinite().all()
        written = ~budget.visible.mT & (output != 0).any(dim=-1)
        unmasked = beyond = lse = rms = element = row = output.new_zeros(0)
        if part.lse is not None:
            unmasked = (part.lse == -torch.inf) == budget.visible
            unmasked |= part.lse.isnan() | (part.lse == torch.inf)
            error, limit = self._lse_error(part, budget)
            beyond, lse = error > limit, error / limit
        if self.problem.output_scale is None:
            error = (output - part.golden.output).abs()
            rms = error.square().mean(dim=-1).sqrt()
            element = share_of(error, budget.element * self.numbers.element_limit)
            row = self._worst_rms(share_of(rms, budget.row_rms), budget, self._allowed(part))
        return Compared(budget, infinite, written, unmasked, beyond, lse, rms, element, row)

    def _stored(self, part: _Part, found: Compared) -> Verdict | None:
        coded = self.problem.output_scale is not None
        return self._codes(part, found.budget) if coded else self._output(part, found)

    def _budget(self, part: _Part) -> Budget:
        allowed = self._allowed(part)
        return self.expectation.budgets.of(part.golden, self.rows, allowed, self.numbers.row_deviations)

    def _allowed(self, part: _Part) -> Roundoffs:
        """What the kernel may have rounded on its way to a part."""
        dequantised = part.golden.terms is not None and part.golden.terms.key_spread is not None
        declared = self.declaration.rounding_of(self.problem.dtype)
        projected = part.golden.projected is not None
        model, weighed = self.problem.output_dtype, part.golden.merging is not None
        return roundoffs(model, declared, self.numbers, part.merged, part.keys, dequantised, projected, weighed)

    def _mask(self, part: _Part, found: Compared) -> Verdict | None:
        """Not a number nowhere, -inf and 0 exactly where no key is visible."""
        if found.largest.infinite:
            output = part.whole.double()
            every = JudgedRows(self.rows.query_start_loc)
            place = Position.of(every, (~output.isfinite()).nonzero()[0].tolist())
            value = output[place.row, place.head, place.column or 0].item()
            hint = explain_mask(part.whole)
            # Parts that are merged may hold NaN behind an LSE of -inf, where a merge reads it.
            if math.isnan(value) and part.call is not None and self.problem.case.poison == "nan":
                hint += _ONLY_NAN
            return failed(Check.MASK, f"{part.name}: output is {value} at {place}{hint}", place.to_json())
        if found.largest.written:
            place = Position.of(self.rows, found.written.nonzero()[0].tolist())
            return failed(
                Check.MASK, f"{part.name}: output is not 0 where no key is visible, at {place}", place.to_json()
            )
        if part.lse is not None and found.largest.unmasked:
            head, token = found.unmasked.nonzero()[0].tolist()
            place = Position.of(self.rows, [token, head])
            want = "finite" if found.budget.visible[head, token] else "-inf, no key is visible"
            got = part.lse[head, token].item()
            return failed(Check.MASK, f"{part.name}: LSE is {got} at {place}, expected {want}", place.to_json())
        return None

    def _lse(self, part: _Part, found: Compared) -> Verdict | None:
        assert part.lse is not None
        share, largest = found.lse, found.largest.lse
        if found.largest.beyond:
            error, limit = self._lse_error(part, found.budget)
            # A kernel that adds weights one by one may be off by more, where that is all that could be wrong: it takes
            # long to tell.
            if bool((error <= limit + most_of_a_sum(part.keys)).all()):
                deviations = self.numbers.row_deviations
                limit = limit + of_running_sums(self.problem, self.rows, part.call, found.beyond, deviations)
            share = error / limit
            largest = worst_of(share)
        self._use(BudgetUse(lse=largest))
        if largest <= 1:
            return None
        place = worst_position(self.rows, share.mT)
        got, want = part.lse[place.head, place.row].item(), part.golden.lse[place.head, place.row].item()
        detail = f"LSE is {got:.7g} at {place}, expected {want:.7g}: {largest:.3g} × its error budget, "
        detail += extent(self.rows, share.mT > 1)
        lse = part.lse.double()
        finding = explain_lse(lse, part.golden.lse) if part.keys > 1 else ""
        detail += "" if finding else common_factor(lse, part.golden.lse, share > 1)
        verdict = failed(Check.LSE, f"{part.name}: {detail}", place.to_json(), self.used)
        output = "wrong as well" if self._stored(part, found) else "right"
        return _beside(replace(verdict, finding=finding), f"the output is {output}")

    def _lse_error(self, part: _Part, budget: Budget) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, T] errors of the LSE, and what is allowed."""
        assert part.lse is not None
        error = (part.lse.double() - part.golden.lse).masked_fill(~budget.visible, 0.0).abs()
        return error, (budget.lse * self.numbers.lse_limit).masked_fill(~budget.visible, 1.0)

    def _output(self, part: _Part, found: Compared) -> Verdict | None:
        """Every element against its budget, then the RMS of every row, then of all rows of a request and head."""
        element, row, budget = found.element, found.row, found.budget
        largest, largest_rms = found.largest.element, found.largest.row
        if largest <= 1 < largest_rms:
            state, allowed = with_shared(self.problem, self.rows, part.golden, part.call), self._allowed(part)
            row = self._worst_rms(share_of(found.rms, expected_row_rms(state, allowed)), budget, allowed)
            largest_rms = worst_of(row)
        self._use(BudgetUse(element=largest, row=largest_rms))
        if max(largest, largest_rms) <= 1:
            return None
        output = part.output.double()
        if largest > 1:
            place = worst_position(self.rows, element)
            index = (place.row, place.head, place.column or 0)
            got, want = part.output[index].item(), part.golden.output[index].item()
            detail = f"output is {got:.5g} at {place}, expected {want:.5g}: {largest:.3g} × its error budget, "
            detail += extent(self.rows, element > 1)
            detail += common_factor(output, part.golden.output, element > 1) if bool(output.any()) else f"; {ZERO}"
        else:
            place = worst_position(self.rows, row)
            detail = f"RMS error around {place} is {largest_rms:.3g} × what rounding explains"
        verdict = failed(Check.OUTPUT, f"{part.name}: {detail}", place.to_json(), self.used)
        return replace(verdict, finding=explain_output(output, part.golden.output))

    def _worst_rms(self, ratio: torch.Tensor, budget: Budget, allowed: Roundoffs) -> torch.Tensor:
        """[T, N] share of the limit: a row's own, or that of all rows of its request and head if it is larger.

        Rows that share keys share the roundings of those, so they are no samples of their own. Where each head projects
        keys of its own, the heads are.
        """
        share = ratio / rms_limit(1, self.numbers.row_deviations)
        if allowed.keys:
            return share
        if allowed.projections:
            limit = rms_limit(ratio.shape[1], self.numbers.row_deviations)
            return torch.maximum(share, ratio.square().mean(dim=1, keepdim=True).sqrt() / limit)
        # Not checked, and told the number of rows: a GPU would be waited for.
        together = torch.segment_reduce(
            ratio.square(), "mean", lengths=budget.samples, axis=0, initial=0.0, unsafe=True
        ).sqrt()
        spread = (together / budget.limits[:, None]).repeat_interleave(budget.samples, dim=0, output_size=len(ratio))
        return torch.maximum(share, spread)

    def _codes(self, part: _Part, budget: Budget) -> Verdict | None:
        """A stored code lies between the codes of both ends of the allowed interval (SPEC 3.5)."""
        assert self.problem.output_scale is not None
        scale = float(self.problem.output_scale)
        low, _, high = self._allowed_codes(part, budget)
        code = e4m3_ordinal(part.output).double()
        outside = torch.maximum(low - code, code - high).clamp(min=0)
        if not bool(outside.any()):
            return None
        place = worst_position(self.rows, outside)
        index = (place.row, place.head, place.column or 0)
        got = dequantize_e4m3(part.output[index], scale).item()
        return failed(
            Check.OUTPUT,
            f"{part.name}: e4m3 code of {got:.5g} at {place}, expected that of {part.golden.output[index].item():.5g}: "
            f"{int(outside[index])} codes outside the allowed interval, {extent(self.rows, outside > 0)}",
            place.to_json(),
            self.used,
        )

    def _allowed_codes(self, part: _Part, budget: Budget) -> tuple[torch.Tensor, ...]:
        """Places of the least allowed code, of the golden one and of the largest, in the order of codes."""
        assert self.problem.output_scale is not None
        golden, scale = part.golden.output, float(self.problem.output_scale)
        ends = (golden - budget.element, golden, golden + budget.element)
        return tuple(e4m3_ordinal(quantize_e4m3(value, scale)).double() for value in ends)


_ONLY_NAN = (
    "; inputs hold NaN only in memory that may not be read (between blocks and rows, in blocks of no request, past a "
    "request's last token), as do results until they are written"
)


def _beside(verdict: Verdict, said: str) -> Verdict:
    """The verdict with what became of the other half of the same result."""
    clause = f" (SPEC {verdict.clause})"
    return replace(verdict, message=f"{verdict.message.removesuffix(clause)}; {said}{clause}")
