"""What the reference expects of a problem: golden states with error terms, per call and of the whole."""

from dataclasses import dataclass

import torch

from mla_conformance.driving.phases import phase
from mla_conformance.judging.budgets import forget_budgets
from mla_conformance.judging.golden_cache import GoldenCache
from mla_conformance.judging.judged_rows import JudgedRows, choose_rows
from mla_conformance.problems.calls import AttentionCall, Question
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.blockwise import blockwise_attention


@dataclass(frozen=True)
class Expectation:
    """Golden states of the judged rows.

    Attributes:
        rows: which rows they are.
        calls: one per call of the problem.
        merged: attention to the keys of all calls at once; None where there is nothing to merge.
    """

    rows: JudgedRows
    calls: tuple[AttentionState, ...]
    merged: AttentionState | None


_cache = GoldenCache()


def expect(problem: Problem) -> Expectation:
    """The golden result, computed once per case for all backends as far as the cache's bound allows."""
    rows = choose_rows(problem)
    calls, merged = _cache.get(problem, lambda: _timed(problem, rows))
    return Expectation(rows, calls, merged)


def forget() -> None:
    """Compute golden results and budgets anew from here on."""
    _cache.forget()
    forget_budgets()


def _timed(problem: Problem, rows: JudgedRows) -> tuple[tuple[AttentionState, ...], AttentionState | None]:
    # A kept result is returned without a word to the device, which a backend may have lost by then.
    with phase("golden", problem.device):
        return _compute(problem, rows)


def _compute(problem: Problem, rows: JudgedRows) -> tuple[tuple[AttentionState, ...], AttentionState | None]:
    states = tuple(_golden(problem, rows, call.question()) for call in problem.calls)
    if not problem.case.is_merged:
        return states, None
    return states, _golden(problem, rows, problem.whole or _unchunked(problem))


def _unchunked(problem: Problem) -> Question:
    """Causal attention over context and new tokens."""
    new, *chunks = problem.calls
    ordered = [*chunks, new]
    lengths = [
        sum(call.key_start_loc[r + 1] - call.key_start_loc[r] for call in ordered) for r in range(len(problem.case.q))
    ]
    k, v = (_per_request(ordered, name) for name in ("k", "v"))
    return Question(new.q, k, v, problem.query_start_loc, start_loc(lengths), causal=True)


def _golden(problem: Problem, rows: JudgedRows, question: Question) -> AttentionState:
    return blockwise_attention(
        question.q,
        question.k,
        question.v,
        query_start_loc=question.query_start_loc,
        key_start_loc=question.key_start_loc,
        scale=problem.case.softmax_scale,
        causal=question.causal,
        with_terms=True,
        with_key_terms=question.dequantised,
        rows=rows.numbers,
    )


def _per_request(calls: list[AttentionCall], name: str) -> torch.Tensor:
    """All keys or values of request 0, then of request 1, and so on; context before new tokens."""
    split = [[getattr(call, name)[rows] for rows in segments(call.key_start_loc)] for call in calls]
    return torch.cat([part for request in zip(*split, strict=True) for part in request])
