"""Problems made from problems: the same inputs regrouped, scaled or rewritten in place, for laws of two runs."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mla_conformance.cases.decode import DecodeCase
from mla_conformance.cases.prefill import PrefillCase
from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.decode_call import DecodeCall, regrouped_metadata
from mla_conformance.problems.layer_call import LayerCall
from mla_conformance.problems.operands import segments, start_loc
from mla_conformance.problems.prefill_call import PrefillCall, assemble_metadata, one_chunk
from mla_conformance.problems.problem import Problem


def regroup(problem: Problem, requests: Sequence[int], queries: int | None = None) -> Problem:
    """The given requests in the given order, each cut to its first ``queries`` new tokens.

    A problem of one call only; for new tokens the keys are cut with the queries, a decode or a layer is not cut.
    """
    call = problem.calls[0]
    if isinstance(call, DecodeCall):
        return _regroup_decode(problem, call, requests)
    if isinstance(call, LayerCall):
        return replace(problem, key=f"{problem.key}|requests={list(requests)}", calls=(call.regrouped(requests),))
    assert isinstance(call, PrefillCall) and isinstance(problem.case, PrefillCase)
    rows = [list(range(s.start, s.stop))[:queries] for s in segments(problem.query_start_loc)]
    keys = rows if call.chunk_idx is None else [list(range(s.start, s.stop)) for s in segments(call.key_start_loc)]
    query_lens = [len(rows[request]) for request in requests]
    key_lens = [len(keys[request]) for request in requests]
    q = call.q[_index(rows, requests, problem.device)]
    picked = _index(keys, requests, problem.device)
    chunks = () if call.chunk_idx is None else one_chunk(key_lens)
    regrouped = replace(
        call,
        q=q,
        k=call.k[picked],
        v=call.v[picked],
        query_start_loc=start_loc(query_lens),
        key_start_loc=start_loc(key_lens),
        metadata=assemble_metadata(problem.case, query_lens, chunks, problem.dtype, problem.device),
    )
    return replace(problem, key=f"{problem.key}|requests={list(requests)}|queries={queries}", calls=(regrouped,))


def _regroup_decode(problem: Problem, call: DecodeCall, requests: Sequence[int]) -> Problem:
    """Other rows of the block table and of the queries; the cache stays as it is."""
    rows = [list(range(s.start, s.stop)) for s in segments(problem.query_start_loc)]
    keys = [list(range(s.start, s.stop)) for s in segments(call.key_start_loc)]
    picked, seen = _index(rows, requests, problem.device), _index(keys, requests, problem.device)
    regrouped = replace(
        call,
        q=call.q[picked],
        k=call.k[seen],
        v=call.v[seen],
        query_start_loc=start_loc([len(rows[request]) for request in requests]),
        key_start_loc=start_loc([len(keys[request]) for request in requests]),
        ql_nope=call.ql_nope[picked],
        q_pe=call.q_pe[picked],
        metadata=regrouped_metadata(call.metadata, requests),
    )
    key = f"{problem.key}|requests={list(requests)}"
    return replace(problem, key=key, calls=(regrouped,))


def _index(rows: list[list[int]], requests: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([row for request in requests for row in rows[request]], dtype=torch.long, device=device)


def scale_values(problem: Problem, factor: float) -> Problem:
    """All values times a power of two, which is exact."""
    calls = tuple(replace(call, v=call.v * factor) for call in problem.calls)
    return replace(problem, key=f"{problem.key}|values={factor}", calls=calls)


def scale_cache(problem: Problem, factor: float) -> Problem:
    """The same decode with ``k_scale`` times a power of two, which only the keys of an fp8 cache know: exactly."""
    assert isinstance(problem.case, DecodeCase)
    meant = factor if problem.case.cache == "fp8" else 1.0
    calls = tuple(_rescaled(call, factor, meant) for call in problem.calls)
    whole = problem.whole and replace(problem.whole, k=problem.whole.k * meant, v=problem.whole.v * meant)
    return replace(problem, key=f"{problem.key}|k_scale={factor}", calls=calls, whole=whole)


def _rescaled(call: AttentionCall, factor: float, meant: float) -> DecodeCall:
    assert isinstance(call, DecodeCall)
    return replace(call, k_scale=call.k_scale * factor, k=call.k * meant, v=call.v * meant)


def overwrite(problem: Problem, other: Problem) -> Problem:
    """The tensors of ``problem`` with the values of ``other``, of the same shapes: same addresses, other contents."""
    calls = tuple(mine.overwritten(theirs) for mine, theirs in zip(problem.calls, other.calls, strict=True))
    return replace(problem, key=other.key, calls=calls, whole=other.whole)
