"""The judge of attention: masks → LSE → output, within the steps that every result is judged by (SPEC 4.1)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mla_conformance.driving.driver import Observation, Returned, parts_of
from mla_conformance.judging import diagnosis, steps, tolerance
from mla_conformance.judging.diagnosis import Position, extent, worst_position
from mla_conformance.judging.golden import Budget, GoldenAttention, JudgedRows, operands_of, visible_to, with_shared
from mla_conformance.judging.record import ZERO, Check, Verdict, failed
from mla_conformance.problems.calls import AttentionCall, attention_call
from mla_conformance.problems.operands import segments
from mla_conformance.reference import attention, quantization
from mla_conformance.reference.error_budget import Roundoffs, expected_row_rms, most_of_a_sum, rms_limit, running_sums


@dataclass(frozen=True)
class _Part:
    name: str  # how messages call it
    keys: int  # keys of the request that has most
    golden: attention.AttentionState  # the golden state
    whole: torch.Tensor  # [T, N, V], the output of all rows; of any float dtype
    output: torch.Tensor  # [rows, N, V], of the judged rows
    lse: torch.Tensor | None  # [N, rows], or None if it was not asked for
    call: int | None  # the number of the call; None for all calls merged
    allowed: Roundoffs  # what the kernel may have rounded on its way to it
    budget: Budget  # how far it may be from the golden state


# A result beside its golden one: what was compared, by name, and the largest of what decides, 0 of none.
Found = tuple[dict[str, torch.Tensor], dict[str, float]]


class AttentionJudge(steps.Steps):
    expectation: GoldenAttention

    def measured(self, observation: Observation) -> Iterator[steps.Measured]:
        for part in self._parts(observation):
            golden, got = part.golden.output, part.output.double()
            if self.problem.output_scale is None:
                # A row that came out larger was rounded more coarsely.
                sizes = got.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1, keepdim=True), golden.norm(dim=-1, keepdim=True)
                growth = torch.where(sizes[1] > 0, sizes[0] / sizes[1], 1.0).clamp(min=1.0)
                yield steps.Measured(got, golden, part.budget.element * self.numbers.element_limit * growth)
            else:
                yield steps.Measured.of_codes(part.output, *self._allowed_codes(part))
            if part.lse is not None:
                golden, got = part.golden.lse, part.lse.double()
                growth = got.nan_to_num(0.0, 0.0, 0.0).abs() / golden.nan_to_num(0.0, 0.0, 0.0).abs().clamp(min=1.0)
                budget = (part.budget.lse * self.numbers.lse_limit).nan_to_num(0.0)
                yield steps.Measured(got, golden, budget * growth.clamp(min=1.0))

    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        for part in self._parts(observation):
            found = self._compared(part)
            yield self._mask(part, found)
            if part.lse is not None:
                yield self._lse(part, found)
            if wrong := self._output(part, found):
                yield wrong if part.lse is None else wrong.with_more("the LSE is right")
            self.inconclusive += int(found[1]["inconclusive"])
        if observation.merge_error:  # then nothing is merged
            yield failed(Check.CALL, f"merge_attn_states raised {observation.merge_error}")

    def _parts(self, observation: Observation) -> Iterator[_Part]:
        case, calls, whole = self.problem.case, self.problem.attention, self.expectation.merged
        found: list[tuple[str, Sequence[AttentionCall], attention.AttentionState, Sequence[torch.Tensor], int]] = []
        for returned, golden in zip(observation.returned, self.expectation.calls, strict=True):
            call = attention_call(returned.call)
            found.append((call.name, [call], golden, parts_of(returned.value), call.merges))
        if whole is not None and observation.merged is not None:
            name = "all parts merged in place" if case.merges_in_place else "all parts merged"
            merges = max(1, len(calls) - 1) if case.own_merge else 1
            found.append((name, calls, whole, observation.merged, merges))
        declared = self.declaration.rounding_of(self.problem.dtype)
        for number, (name, asked, golden, (output, *lse), merges) in enumerate(found):
            keys = max(map(sum, zip(*(call.key_lens for call in asked), strict=True)))
            allowed = tolerance.roundoffs(
                *(self.problem.output_dtype, declared, self.numbers, merges, keys, asked[0].q.shape[-1]),
                exact=golden is whole and not case.own_merge,
                dequantised=golden.terms is not None and golden.terms.key_spread is not None,
                projected=golden.projected is not None,
                weighed=golden.merging is not None,
            )
            yield _Part(
                name=name,
                keys=keys,
                golden=golden,
                whole=output[: self.rows.query_start_loc[-1]],
                output=self.rows.pick(output),
                lse=self.rows.pick(lse[0], dim=1) if lse else None,
                call=None if golden is whole else number,
                allowed=allowed,
                budget=self.expectation.budget(golden, allowed, self.numbers.row_deviations),
            )

    def _expected_form(self, returned: Returned) -> steps.Form:
        call = attention_call(returned.call)
        dtype = self.problem.output_dtype if returned.out is None else returned.out.view.dtype
        form = [("output", torch.Size(call.result_shape), dtype)]
        if call.returns_lse:
            form.append(("LSE", torch.Size((self.problem.case.heads, call.q.shape[0])), torch.float32))
        return form

    def _compared(self, part: _Part) -> Found:
        budget, output, whole = part.budget, part.output.double(), part.whole
        infinite = ~(whole.double() if whole.dtype.itemsize == 1 else whole).isfinite().all()
        written = ~budget.visible.mT & (output != 0).any(dim=-1)  # [T, N], not 0 where no key is visible
        decisive = {"infinite": infinite, "written": written, "inconclusive": budget.inconclusive.sum()}
        found = dict(decisive)
        if part.lse is not None:  # all of it [N, T]
            # No number, or -inf elsewhere than where no key is visible.
            unmasked = (part.lse == -torch.inf) == budget.visible
            unmasked |= part.lse.isnan() | (part.lse == torch.inf)
            error = (part.lse.double() - part.golden.lse).masked_fill(~budget.visible, 0.0).abs()
            limit = (budget.lse * self.numbers.lse_limit).masked_fill(~budget.visible, 1.0)
            decisive |= {"unmasked": unmasked, "beyond": error > limit, "lse": error / limit}
            found |= {"lse_error": error, "lse_limit": limit}
        if self.problem.output_scale is None:
            error = (output - part.golden.output).abs()
            rms = error.square().mean(dim=-1).sqrt()
            decisive["element"] = steps.share_of(error, budget.element * self.numbers.element_limit)
            decisive["row"] = self._worst_rms(steps.share_of(rms, budget.row_rms), part)
            found["rms"] = rms
        zero = output.new_zeros(())  # in one transfer: a shared GPU takes longer to answer than to compute all of it
        numbers = torch.stack([x.max().double() if x.numel() else zero for x in decisive.values()]).tolist()
        return found | decisive, dict(zip(decisive, numbers, strict=True))

    def _mask(self, part: _Part, compared: Found) -> Verdict | None:
        found, largest = compared
        if largest["infinite"]:
            output = part.whole.double()
            place = Position.of(JudgedRows(self.rows.query_start_loc), (~output.isfinite()).nonzero()[0].tolist())
            value = output[place.row, place.head, place.column or 0].item()
            vectors, hint = part.whole.isnan().all(dim=-1), ""
            for lost, name in ((vectors.all(dim=1), "row"), (vectors.all(dim=0), "head")):
                if bool(lost.any()) and not hint:
                    hint = f"; {diagnosis.reach_of(lost, name)} hold nothing but NaN"
            # Parts that are merged may hold NaN behind an LSE of -inf, where a merge reads it.
            if math.isnan(value) and part.call is not None and self.problem.case.poison == "nan":
                hint += _ONLY_NAN
            return failed(Check.MASK, f"{part.name}: output is {value} at {place}{hint}", place.to_json())
        if largest["written"]:
            place = Position.of(self.rows, found["written"].nonzero()[0].tolist())
            row = part.output[place.row, place.head].double()
            detail = f"output is {row[row.abs().argmax()]:.5g} where no key is visible, expected 0, at {place}"
            return failed(Check.MASK, f"{part.name}: {detail}", place.to_json())
        if part.lse is not None and largest["unmasked"]:
            head, token = found["unmasked"].nonzero()[0].tolist()
            place = Position.of(self.rows, [token, head])
            want = "finite" if part.budget.visible[head, token] else "-inf, no key is visible"
            got = part.lse[head, token].item()
            return failed(Check.MASK, f"{part.name}: LSE is {got} at {place}, expected {want}", place.to_json())
        return None

    def _lse(self, part: _Part, compared: Found) -> Verdict | None:
        assert part.lse is not None
        found, (share, largest) = compared[0], (compared[0]["lse"], compared[1]["lse"])
        if compared[1]["beyond"]:
            error, limit = found["lse_error"], found["lse_limit"]
            # A kernel that adds weights one by one may be off by more, where that is all that could be wrong: it takes
            # long to tell.
            if bool((error <= limit + most_of_a_sum(part.keys)).all()):
                operands, deviations = operands_of(self.problem, part.call), self.numbers.row_deviations
                q, visible, scale = self.rows.pick(operands.q), visible_to(operands, self.rows), self.case.softmax_scale
                limit = limit + running_sums(q, operands.k, visible, found["beyond"], scale, deviations)
            share = error / limit
            largest = steps.worst_of(share)
        self.used = replace(self.used, lse=max(self.used.lse, largest))
        if largest <= 1:
            return None
        place = worst_position(self.rows, share.mT)
        got, want = part.lse[place.head, place.row].item(), part.golden.lse[place.head, place.row].item()
        detail = f"LSE is {got:.7g} at {place}, expected {want:.7g}: {largest:.3g} × its error budget, "
        detail += extent(self.rows, share.mT > 1)
        lse = part.lse.double()
        finding = diagnosis.explain_lse(lse, part.golden.lse) if part.keys > 1 else ""
        detail += "" if finding else diagnosis.common_factor(lse, part.golden.lse, share > 1)
        verdict = failed(Check.LSE, f"{part.name}: {detail}", place.to_json(), self.used)
        output = "wrong as well" if self._output(part, compared) else "right"
        return replace(verdict, finding=finding).with_more(f"the output is {output}")

    def _output(self, part: _Part, compared: Found) -> Verdict | None:
        """Every element against its budget, then the RMS of every row, then of all rows of a request and head."""
        if self.problem.output_scale is not None:
            return self._codes(part)
        found, most = compared
        element, row, largest, largest_rms = found["element"], found["row"], most["element"], most["row"]
        if largest <= 1 < largest_rms:
            state = with_shared(self.problem, self.rows, part.golden, part.call)
            row = self._worst_rms(steps.share_of(found["rms"], expected_row_rms(state, part.allowed)), part, alike=True)
            largest_rms = steps.worst_of(row)
        self.used = replace(self.used, element=max(self.used.element, largest), row=max(self.used.row, largest_rms))
        if max(largest, largest_rms) <= 1:
            return None
        output = part.output.double()
        if largest > 1:
            place = worst_position(self.rows, element)
            index = (place.row, place.head, place.column or 0)
            got, want = part.output[index].item(), part.golden.output[index].item()
            detail = f"output is {got:.5g} at {place}, expected {want:.5g}: {largest:.3g} × its error budget, "
            detail += extent(self.rows, element > 1)
            factor = diagnosis.common_factor(output, part.golden.output, element > 1)
            detail += factor if bool(output.any()) else f"; {ZERO}"
        else:
            place = worst_position(self.rows, row)
            detail = f"RMS error around {place} is {largest_rms:.3g} × what rounding explains"
        verdict = failed(Check.OUTPUT, f"{part.name}: {detail}", place.to_json(), self.used)
        return replace(verdict, finding=diagnosis.explain_output(output, part.golden.output))

    def _worst_rms(self, ratio: torch.Tensor, part: _Part, alike: bool = False) -> torch.Tensor:
        """[T, N] share of the limit: a row's own, or that of all rows of its request and head if it is larger.

        Rows that are ``alike``, which is looked for where it could matter, are no samples of their own.
        """
        share = ratio / rms_limit(1, self.numbers.row_deviations)
        if part.allowed.keys:  # whose roundings rows share
            return share
        if part.allowed.projections:  # of keys of its own for each head
            limit = rms_limit(ratio.shape[1], self.numbers.row_deviations)
            return torch.maximum(share, ratio.square().mean(dim=1, keepdim=True).sqrt() / limit)
        together = torch.segment_reduce(  # not checked, and told the number of rows: a GPU would be waited for
            ratio.square(), "mean", lengths=part.budget.samples, axis=0, initial=0.0, unsafe=True
        ).sqrt()
        of_all = together / part.budget.limits[:, None]
        if alike:
            rounded = part.golden.output.to(self.problem.output_dtype).double()
            requests = list(segments(self.rows.start_loc))
            for request, head in (of_all > 1).nonzero().tolist():
                counts = rounded[requests[request], head].unique(dim=0, return_counts=True)[1].double()
                samples = float(counts.sum().square() / counts.square().sum())
                of_all[request, head] = together[request, head] / rms_limit(samples, self.numbers.row_deviations)
        return torch.maximum(share, of_all.repeat_interleave(part.budget.samples, dim=0, output_size=len(ratio)))

    def _codes(self, part: _Part) -> Verdict | None:
        assert self.problem.output_scale is not None
        low, _, high = self._allowed_codes(part)
        code = quantization.e4m3_ordinal(part.output).double()
        outside = torch.maximum(low - code, code - high).clamp(min=0)
        if not bool(outside.any()):
            return None
        place = worst_position(self.rows, outside)
        index = (place.row, place.head, place.column or 0)
        got = quantization.dequantize_e4m3(part.output[index], float(self.problem.output_scale)).item()
        return failed(
            Check.OUTPUT,
            f"{part.name}: e4m3 code of {got:.5g} at {place}, expected that of {part.golden.output[index].item():.5g}: "
            f"{int(outside[index])} codes outside the allowed interval, {extent(self.rows, outside > 0)}",
            place.to_json(),
            self.used,
        )

    def _allowed_codes(self, part: _Part) -> tuple[torch.Tensor, ...]:
        assert self.problem.output_scale is not None
        golden, scale = part.golden.output, float(self.problem.output_scale)
        ends = (golden - part.budget.element, golden, golden + part.budget.element)
        return tuple(quantization.e4m3_ordinal(quantization.quantize_e4m3(value, scale)).double() for value in ends)


_ONLY_NAN = (
    "; inputs hold NaN only in memory that may not be read (between blocks and rows, in blocks of no request, past a "
    "request's last token), as do results until they are written; arithmetic that overflows makes it, too"
)
