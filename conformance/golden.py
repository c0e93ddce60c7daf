"""What the reference expects of a problem: golden states with error terms, per call and of the whole."""

from dataclasses import dataclass

import torch

from mla_conformance.case import Call
from mla_conformance.golden_cache import GoldenCache
from mla_conformance.judged_rows import JudgedRows, choose_rows
from mla_conformance.problem import PrefillCall, Problem, segments, start_loc
from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.blockwise import blockwise_attention


@dataclass(frozen=True)
class Expectation:
    """Golden states of the judged rows.

    Attributes:
        rows: which rows they are.
        calls: one per call of the problem.
        merged: unchunked attention over context and new tokens; None where there is one call only.
    """

    rows: JudgedRows
    calls: tuple[AttentionState, ...]
    merged: AttentionState | None


_cache = GoldenCache()


def expect(problem: Problem) -> Expectation:
    """The golden result, computed once per case for all backends as far as the cache's bound allows."""
    rows = choose_rows(problem)
    calls, merged = _cache.get(problem, lambda: _compute(problem, rows))
    return Expectation(rows, calls, merged)


def _compute(problem: Problem, rows: JudgedRows) -> tuple[tuple[AttentionState, ...], AttentionState | None]:
    states = tuple(
        _golden(problem, rows, call.k, call.v, call.key_start_loc, call.chunk_idx is None) for call in problem.calls
    )
    if problem.case.call != Call.CHUNKED_CONTEXT:
        return states, None
    new, *chunks = problem.calls
    ordered = [*chunks, new]
    lengths = [
        sum(call.key_start_loc[r + 1] - call.key_start_loc[r] for call in ordered) for r in range(len(problem.case.q))
    ]
    k, v = (_per_request(ordered, name) for name in ("k", "v"))
    return states, _golden(problem, rows, k, v, start_loc(lengths), causal=True)


def _golden(
    problem: Problem, rows: JudgedRows, k: torch.Tensor, v: torch.Tensor, keys: tuple[int, ...], causal: bool
) -> AttentionState:
    return blockwise_attention(
        problem.calls[0].q,
        k,
        v,
        query_start_loc=problem.query_start_loc,
        key_start_loc=keys,
        scale=problem.case.softmax_scale,
        causal=causal,
        with_terms=True,
        rows=rows.numbers,
    )


def _per_request(calls: list[PrefillCall], name: str) -> torch.Tensor:
    """All keys or values of request 0, then of request 1, and so on; context before new tokens."""
    split = [[getattr(call, name)[rows] for rows in segments(call.key_start_loc)] for call in calls]
    return torch.cat([part for request in zip(*split, strict=True) for part in request])
