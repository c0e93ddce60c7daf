"""What the reference expects of a problem: golden states with error terms, per call and of the whole."""

from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import torch

from mla_conformance.judging.judged_rows import JudgedRows, choose_rows
from mla_conformance.problems.calls import AttentionOperands, Problem
from mla_conformance.problems.operands import ProblemError, segments, start_loc
from mla_conformance.reference import error_budget
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.blockwise import blockwise_attention
from mla_conformance.reference.projections import projected_terms
from mla_conformance.reference.roundings import MergeTerms, merged_chunks, merged_states, shared_roundings
from mla_conformance.reference.selected import NO_KEY, selected_attention, sink_share

_MOST_KEPT = 8


@dataclass(frozen=True)
class Budget:
    visible: torch.Tensor  # [N, T] bool, the rows that see a key
    element: torch.Tensor  # [T, N, V] largest error of the output
    row_rms: torch.Tensor  # [T, N] expected RMS error of the output over the columns
    lse: torch.Tensor  # [N, T] largest error of the LSE
    samples: torch.Tensor  # [B] int64, rows of each request
    limits: torch.Tensor  # [B] largest plausible RMS of a request's rows over its expectation
    inconclusive: torch.Tensor  # [T, N] bool, rows of which zeros would pass, though the golden output has others


@dataclass(frozen=True)
class Golden:
    rows: JudgedRows  # which rows they are


@dataclass(frozen=True)
class GoldenAttention(Golden):
    calls: tuple[AttentionState, ...]  # one per call of the problem
    merged: AttentionState | None  # attention to the keys of all calls at once; None where there is nothing to merge
    _budgets: dict[tuple[int, error_budget.Roundoffs, float], Budget] = field(default_factory=dict)

    def budget(self, golden: AttentionState, allowed: error_budget.Roundoffs, row_deviations: float) -> Budget:
        key = (id(golden), allowed, row_deviations)  # of a state that outlives this: no other has its id meanwhile
        if key not in self._budgets:
            if len(self._budgets) >= _MOST_KEPT:
                self._budgets.clear()
            lengths = [part.stop - part.start for part in segments(self.rows.start_loc)]
            parts = error_budget.budget_parts(golden, allowed)
            element = error_budget.element_budget(golden, allowed, parts)
            row_rms = error_budget.expected_row_rms(golden, allowed, parts)
            limits = [error_budget.rms_limit(max(1, count), row_deviations) for count in lengths]
            size = golden.output.abs()
            within = size.square().mean(dim=-1).sqrt() <= row_rms * error_budget.rms_limit(1, row_deviations)
            self._budgets[key] = Budget(
                visible=golden.lse != -torch.inf,
                element=element,
                row_rms=row_rms,
                inconclusive=within & (size <= element).all(dim=-1) & (size > 0).any(dim=-1),
                lse=error_budget.lse_budget(golden, allowed),
                samples=torch.tensor(lengths, dtype=torch.long, device=golden.lse.device),
                limits=golden.lse.new_tensor(limits),
            )
        return self._budgets[key]


def golden_attention(problem: Problem) -> GoldenAttention:
    rows = choose_rows(problem)
    states = tuple(golden_state(problem, rows, call.operands()) for call in problem.attention)
    merged = golden_state(problem, rows, operands_of(problem, None)) if problem.case.is_merged else None
    if merged and problem.case.own_merge:
        new, *chunks = states
        parts = [*chunks, new]
        terms = merged_states([part.output for part in parts], [part.lse for part in parts], merged.lse)
        merged = replace(merged, merging=terms)
    if not torch.stack([x.output.isfinite().all() for x in (*states, *([merged] if merged else []))]).all():
        raise ProblemError("the golden result is not finite: the inputs are at fault, not the kernel")
    return GoldenAttention(rows, states, merged)


def operands_of(problem: Problem, call: int | None) -> AttentionOperands:
    """What a call attends to; of None all together, of chunks causal attention over context and new tokens."""
    if call is not None:
        return problem.attention[call].operands()
    if problem.whole:
        return problem.whole
    new, *chunks = problem.attention
    ordered = [*chunks, new]
    lengths = [
        sum(call.key_start_loc[r + 1] - call.key_start_loc[r] for call in ordered) for r in range(len(problem.case.q))
    ]
    operands = []
    for name in ("k", "v"):  # of request 0, then of request 1, and so on; context before new tokens
        split = [[getattr(call, name)[rows] for rows in segments(call.key_start_loc)] for call in ordered]
        operands.append(torch.cat([part for request in zip(*split, strict=True) for part in request]))
    k, v = operands
    return AttentionOperands(new.q, k, v, problem.query_start_loc, start_loc(lengths), causal=True)


def with_shared(problem: Problem, rows: JudgedRows, state: AttentionState, call: int | None) -> AttentionState:
    """A golden state, of a call or of all merged, with `shared_roundings`, which take several times as long."""
    if problem.output_dtype is torch.float32:
        return state
    operands = operands_of(problem, call)
    ends = [stop - 1 for start, stop in pairwise(rows.start_loc) if stop > start]
    q, visible = rows.pick(operands.q), visible_to(operands, rows)
    shared = shared_roundings(q, operands.k, operands.v, visible, ends, problem.case.softmax_scale)
    share = 1.0 if operands.sink is None else sink_share(state.lse, operands.sink).square()
    return replace(state, shared=shared * share)


def visible_to(operands: AttentionOperands, rows: JudgedRows) -> list[slice] | list[torch.Tensor]:
    if operands.selected is not None:
        # On the CPU, since a GPU is waited for in each row.
        return [named[named != NO_KEY] for named in rows.pick(operands.selected).cpu()]
    bounds = zip(segments(operands.query_start_loc), segments(operands.key_start_loc), strict=True)
    seen = [
        slice(keys.start, max(keys.start, keys.stop - (queries.stop - 1 - row) * operands.causal))
        for queries, keys in bounds
        for row in range(queries.start, queries.stop)
    ]
    return [seen[rows.number(judged)] for judged in range(rows.start_loc[-1])]


def golden_state(problem: Problem, rows: JudgedRows, operands: AttentionOperands) -> AttentionState:
    qkv, scale = (operands.q, operands.k, operands.v), problem.case.softmax_scale
    asked: dict[str, Any] = {"with_key_terms": operands.dequantised, "rows": rows.numbers, "scale": scale}
    if operands.selected is not None:
        state = selected_attention(*qkv, operands.selected, sink=operands.sink, with_terms=True, **asked)
        return replace(state, value_weights=operands.value_weights)
    starts: dict[str, Any] = {"query_start_loc": operands.query_start_loc, "key_start_loc": operands.key_start_loc}
    state = blockwise_attention(*qkv, causal=operands.causal, **(starts | asked))
    if operands.projection is not None:
        terms = projected_terms(*qkv, operands.projection, **starts, scale=scale)
        state = replace(state, projected=terms.map(rows.pick))
    if operands.plans:
        parts = (rows.pick(operands.q), operands.k, operands.v, state.output, state.lse)
        where: dict[str, Any] = {"rows": segments(rows.start_loc), "keys": segments(operands.key_start_loc)}
        plans = [merged_chunks(*parts, **where, ends=ends, scale=scale) for ends in dict.fromkeys(operands.plans)]
        state = replace(state, merging=reduce(MergeTerms.larger, plans))
    return replace(state, value_weights=operands.value_weights)
