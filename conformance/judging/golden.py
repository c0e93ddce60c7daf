"""Which rows are judged, what the reference expects of them, with error terms, and what judging a case takes.

Rows are chosen by the problem alone, so that every backend and every machine with the same limit judges the same.
"""

import hashlib
import random
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, islice, pairwise, zip_longest
from typing import Any, NamedTuple

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case
from mla_conformance.problems.calls import AttentionOperands, Problem
from mla_conformance.problems.operands import ProblemError, segments, start_loc
from mla_conformance.reference import blockwise, error_budget, projections, selected
from mla_conformance.reference.attention import AttentionState

# Useful operations up to which every row is judged, by type of device: seconds of a CPU, one second of an H200.
FULL_OPERATIONS = {"cpu": 2e11, "cuda": 2e13}
FULL_RESULTS = 5e9  # bytes of results in float64, those of each rank among them, up to which every row is judged
TELLING_ROWS = 128  # rows at ends and edges that are judged at most, before others are drawn
DRAWN_ROWS = 384


@dataclass(frozen=True)
class JudgedRows:
    query_start_loc: tuple[int, ...]  # first row of each request of the batch, and the end
    numbers: tuple[int, ...] | None = None  # the judged rows, ascending; None for all
    drawn: int = 0  # how many of them were drawn at random from those that are not telling

    @property
    def start_loc(self) -> tuple[int, ...]:
        if self.numbers is None:
            return self.query_start_loc
        return tuple(bisect_left(self.numbers, start) for start in self.query_start_loc)

    def number(self, judged: int) -> int:
        return judged if self.numbers is None else self.numbers[judged]

    def pick(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The judged rows of a tensor whose dimension ``dim`` is the batch's rows, padding rows after them."""
        if self.numbers is None:
            return rows.narrow(dim, 0, self.query_start_loc[-1])
        return rows.index_select(dim, torch.tensor(self.numbers, dtype=torch.long, device=rows.device))


def choose_rows(problem: Problem) -> JudgedRows:
    starts, rows = problem.query_start_loc, list(segments(problem.query_start_loc))
    lengths = [each.stop - each.start for each in rows]
    seen = map(sum, zip(*(call.key_lens for call in problem.calls), strict=True))
    causal = problem.case.causal and problem.case.call != Call.CONTEXT_CHUNK  # of what it sees beside new tokens
    beside = [max(0, keys - new * causal) for keys, new in zip(seen, lengths, strict=True)]
    few = problem.case.operations(lengths, beside) <= FULL_OPERATIONS[problem.device.type]
    if (few and _result_bytes(problem.case) <= FULL_RESULTS) or starts[-1] <= TELLING_ROWS + DRAWN_ROWS:
        return JudgedRows(starts)
    # Ends of requests first, then rows on both sides of tiles, pages and chunks, small ones first, request by request.
    ends = (row for each in rows if each.stop > each.start for row in (each.start, each.stop - 1))
    sizes = sorted({2**power for power in range(1, 31)} | {problem.case.page, problem.case.workspace})
    edges = [
        [each.start + at for size in sizes for at in (size - 1, size) if at < each.stop - each.start] for each in rows
    ]
    in_turn = (row for layer in zip_longest(*edges) for row in layer if row is not None)
    telling = set(islice(dict.fromkeys(chain(ends, in_turn)), TELLING_ROWS))
    rest = [row for row in range(starts[-1]) if row not in telling]
    drawn = random.Random(hashlib.sha256(problem.key.encode()).digest()).sample(rest, DRAWN_ROWS)
    return JudgedRows(starts, tuple(sorted([*telling, *drawn])), DRAWN_ROWS)


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
        parts = [*states[1:], states[0]]  # new tokens come last
        terms = error_budget.merged_states([part.output for part in parts], [part.lse for part in parts], merged.lse)
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
    lengths = [*map(sum, zip(*(call.key_lens for call in ordered), strict=True))]

    def together(name: str) -> torch.Tensor:  # of request 0, then of request 1, and so on; context before new tokens
        split = [[getattr(call, name)[rows] for rows in segments(call.key_start_loc)] for call in ordered]
        return torch.cat([part for request in zip(*split, strict=True) for part in request])

    starts = problem.query_start_loc, start_loc(lengths)
    return AttentionOperands(new.q, together("k"), together("v"), *starts, causal=True)


def with_shared(problem: Problem, rows: JudgedRows, state: AttentionState, call: int | None) -> AttentionState:
    """A golden state, of a call or of all merged, with `shared_roundings`, which take several times as long."""
    if problem.output_dtype is torch.float32:
        return state
    operands = operands_of(problem, call)
    ends = [stop - 1 for start, stop in pairwise(rows.start_loc) if stop > start]
    q, visible = rows.pick(operands.q), visible_to(operands, rows)
    shared = error_budget.shared_roundings(q, operands.k, operands.v, visible, ends, problem.case.softmax_scale)
    share = 1.0 if operands.sink is None else selected.sink_share(state.lse, operands.sink).square()
    return replace(state, shared=shared * share)


def visible_to(operands: AttentionOperands, rows: JudgedRows) -> list[slice] | list[torch.Tensor]:
    if operands.selected is not None:
        # On the CPU, since a GPU is waited for in each row.
        return [named[named != selected.NO_KEY] for named in rows.pick(operands.selected).cpu()]
    seen = [
        slice(keys.start, max(keys.start, keys.stop - (queries.stop - 1 - row) * operands.causal))
        for queries, keys in zip(segments(operands.query_start_loc), segments(operands.key_start_loc), strict=True)
        for row in range(queries.start, queries.stop)
    ]
    return [seen[rows.number(judged)] for judged in range(rows.start_loc[-1])]


def golden_state(problem: Problem, rows: JudgedRows, operands: AttentionOperands) -> AttentionState:
    qkv, scale = (operands.q, operands.k, operands.v), problem.case.softmax_scale
    asked: dict[str, Any] = {"with_key_terms": operands.dequantised, "rows": rows.numbers, "scale": scale}
    if operands.selected is not None:
        state = selected.selected_attention(*qkv, operands.selected, sink=operands.sink, with_terms=True, **asked)
        return replace(state, value_weights=operands.value_weights)
    starts: dict[str, Any] = {"query_start_loc": operands.query_start_loc, "key_start_loc": operands.key_start_loc}
    state = blockwise.blockwise_attention(*qkv, causal=operands.causal, **(starts | asked))
    if operands.projection is not None:
        terms = projections.projected_terms(*qkv, operands.projection, **starts, scale=scale)
        state = replace(state, projected=terms.map(rows.pick))
    if operands.plans:
        parts = (rows.pick(operands.q), operands.k, operands.v, state.output, state.lse)
        where: dict[str, Any] = {"rows": segments(rows.start_loc), "keys": segments(operands.key_start_loc)}
        plans = [
            error_budget.merged_chunks(*parts, **where, ends=ends, scale=scale)
            for ends in dict.fromkeys(operands.plans)
        ]
        total, squares = (reduce(torch.maximum, terms) for terms in zip(*plans, strict=True))
        state = replace(state, merging=(total, squares))
    return replace(state, value_weights=operands.value_weights)


_MARGIN_BYTES = 2 << 30
_FAR_ITEM_BYTES = 2
_FAR_KERNELS = (Role.PREFILL, Role.DECODE, Role.SPARSE)
_FAR_BYTES = 8  # of others: they have float32, or two caches


class Reach(NamedTuple):
    operand: str  # ``q``, ``k``, ``v``, ``rows`` or ``cache``
    elements: int  # that many lie before what is judged

    @staticmethod
    def of(case: Case) -> "Reach":
        return Reach(case.far[:-2], 2 ** int(case.far[-2:]))


def needed_bytes(case: Case) -> int:
    reach = Reach.of(case)
    if reach.operand != "rows":
        each = _FAR_ITEM_BYTES if case.role in _FAR_KERNELS else _FAR_BYTES
        return 2 * each * reach.elements + _MARGIN_BYTES
    return _FAR_ITEM_BYTES * rows_before(case) * (case.sizes.row + case.sizes.output) + _MARGIN_BYTES


def rows_before(case: Case) -> int:  # whose output, narrower than the queries, reaches as far as the case says
    return -(-Reach.of(case).elements // case.sizes.output)


MOST_OPERATIONS = {"cpu": 1e12}  # useful ones of the largest case that a device is asked for; a CPU would take hours
_WORKSPACE = 2**28
_INPUT_COPIES, _RESULT_COPIES = 6, 16
_MERGED_COPIES = 6  # of one result, while those of ranks are merged
_RANK_COPIES = 10  # copies of the results that are kept of each rank, where there are several
_ITEM_BYTES = {"fp32": 4, "fp64": 8}


def _result_bytes(case: Case) -> int:
    ranks = case.ranks if isinstance(case, CachedCase) and case.is_merged else 1
    return 8 * ranks * sum(case.q) * case.sizes.output


def memory_need(case: Case, device_type: str) -> int:
    """Bytes that judging a case takes at most, generously: inputs and their copies, results in float64, workspaces."""
    dims = case.dimensions
    rows, keys = sum(case.q) + case.pad, sum(case.q) + sum(case.kv)
    inputs = _INPUT_COPIES * _ITEM_BYTES.get(case.dtype, 2) * (rows * case.sizes.row + keys * case.sizes.key)
    projected = 3 * 8 * min(case.workspace, keys) * case.heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    whole = case.operations() <= FULL_OPERATIONS[device_type] and _result_bytes(case) <= FULL_RESULTS
    judged = rows if whole else min(rows, TELLING_ROWS + DRAWN_ROWS)
    ranks = case.ranks if isinstance(case, CachedCase) and case.is_merged else 0
    results = (_RESULT_COPIES + _RANK_COPIES * ranks) * 8 * judged * case.sizes.output
    if ranks and not whole:  # all rows are merged before some are judged
        results += (8 * _MERGED_COPIES + 2 * ranks) * rows * case.sizes.output
    far = 0 if case.far == "none" else needed_bytes(case)
    return far + _WORKSPACE + inputs + results + (projected if case.call == Call.CHUNKED_CONTEXT else 0)
