"""What the reference expects of a problem: golden states with error terms, per call and of the whole."""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from mla_conformance.calls import AttentionCall, Question
from mla_conformance.problem import Problem, segments, start_loc
from mla_conformance.reference.attention import AttentionState, attention

_KEPT = 8


@dataclass(frozen=True)
class Expectation:
    """Golden states.

    Attributes:
        calls: one per call of the problem.
        merged: attention to the keys of all calls at once; None where there is nothing to merge.
    """

    calls: tuple[AttentionState, ...]
    merged: AttentionState | None


_recent: OrderedDict[tuple[str, str], Expectation] = OrderedDict()


def expect(problem: Problem) -> Expectation:
    """The golden result, computed once per case for all backends; the last few are kept."""
    key = (problem.key, str(problem.device))
    if key not in _recent:
        _recent[key] = _compute(problem)
        if len(_recent) > _KEPT:
            _recent.popitem(last=False)
    return _recent[key]


def _compute(problem: Problem) -> Expectation:
    states = tuple(_golden(problem, call.question(problem)) for call in problem.calls)
    if not problem.is_merged:
        return Expectation(states, None)
    return Expectation(states, _golden(problem, problem.whole or _unchunked(problem)))


def _unchunked(problem: Problem) -> Question:
    """Causal attention over context and new tokens."""
    new, *chunks = problem.calls
    ordered = [*chunks, new]
    lengths = [
        sum(call.key_start_loc[r + 1] - call.key_start_loc[r] for call in ordered) for r in range(len(problem.case.q))
    ]
    k, v = (_per_request(ordered, name) for name in ("k", "v"))
    return Question(new.q, k, v, problem.query_start_loc, start_loc(lengths), causal=True)


def _golden(problem: Problem, question: Question) -> AttentionState:
    return attention(
        question.q,
        question.k,
        question.v,
        query_start_loc=question.query_start_loc,
        key_start_loc=question.key_start_loc,
        scale=problem.case.softmax_scale,
        causal=question.causal,
        with_terms=True,
        with_key_terms=question.dequantised,
    )


def _per_request(calls: list[AttentionCall], name: str) -> torch.Tensor:
    """All keys or values of request 0, then of request 1, and so on; context before new tokens."""
    split = [[getattr(call, name)[rows] for rows in segments(call.key_start_loc)] for call in calls]
    return torch.cat([part for request in zip(*split, strict=True) for part in request])
