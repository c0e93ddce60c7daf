"""Problems made from problems: the same inputs regrouped, scaled or rewritten in place, for laws of two runs."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mla_conformance.calls import PrefillCall
from mla_conformance.case import Call
from mla_conformance.problem import Problem, assemble_metadata, one_chunk, segments, start_loc


def regroup(problem: Problem, requests: Sequence[int], queries: int | None = None) -> Problem:
    """The given requests in the given order, each cut to its first ``queries`` new tokens.

    A problem of one call only; for new tokens the keys are cut with the queries.
    """
    call = problem.calls[0]
    rows = [list(range(s.start, s.stop))[:queries] for s in segments(problem.query_start_loc)]
    keys = rows if call.chunk_idx is None else [list(range(s.start, s.stop)) for s in segments(call.key_start_loc)]
    query_lens = [len(rows[request]) for request in requests]
    key_lens = [len(keys[request]) for request in requests]
    q = call.q[_index(rows, requests, problem.device)]
    picked = _index(keys, requests, problem.device)
    regrouped = PrefillCall(call.chunk_idx, q, call.k[picked], call.v[picked], start_loc(key_lens))
    chunks = one_chunk(key_lens) if problem.case.call == Call.CONTEXT_CHUNK else ()
    return replace(
        problem,
        key=f"{problem.key}|requests={list(requests)}|queries={queries}",
        query_start_loc=start_loc(query_lens),
        calls=(regrouped,),
        metadata=assemble_metadata(problem.case, query_lens, chunks, problem.dtype, problem.device),
    )


def _index(rows: list[list[int]], requests: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([row for request in requests for row in rows[request]], dtype=torch.long, device=device)


def scale_values(problem: Problem, factor: float) -> Problem:
    """All values times a power of two, which is exact."""
    calls = tuple(replace(call, v=call.v * factor) for call in problem.calls)
    return replace(problem, key=f"{problem.key}|values={factor}", calls=calls)


def overwrite(problem: Problem, other: Problem) -> Problem:
    """The tensors of ``problem`` with the values of ``other``, of the same shapes: same addresses, other contents."""
    for mine, theirs in zip(problem.calls, other.calls, strict=True):
        for name in ("q", "k", "v"):
            getattr(mine, name).copy_(getattr(theirs, name))
    return replace(problem, key=other.key)
