"""One request's inputs made unusable in place: not a number, infinite, or as large as the dtype allows."""

import torch

from mla_conformance.problems.calls import AttentionCall
from mla_conformance.problems.decode_call import DecodeCall
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import segments
from mla_conformance.problems.prefill_call import PrefillCall
from mla_conformance.problems.problem import Problem

KINDS = ("nan", "inf", "largest")
"""What spoiled values are, in turn; codes, which know no infinity, are never numbers."""


def spoil_queries(problem: Problem, request: int, kind: str) -> None:
    """Every query of a request, in every call."""
    for call in problem.calls:
        for tensor in _queries(call):
            rows = tensor[list(segments(call.query_start_loc))[request]]
            rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))


def spoil_keys(problem: Problem, request: int, kind: str) -> None:
    """Every key and value of a request, in every call: of a decode its entries of the cache."""
    for call in problem.calls:
        if isinstance(call, DecodeCall):
            _spoil_entries(call, request, kind)
            continue
        assert isinstance(call, PrefillCall)
        for tensor in (call.k, call.v):
            rows = tensor[list(segments(call.key_start_loc))[request]]
            rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))


def _queries(call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """The queries as they are handed over."""
    return (call.ql_nope, call.q_pe) if isinstance(call, DecodeCall) else (call.q,)


def _spoil_entries(call: DecodeCall, request: int, kind: str) -> None:
    cache, page = call.kv_cache, call.kv_cache.shape[1]
    tokens = torch.arange(int(call.metadata.seq_lens_cpu[request]), device=cache.device)
    blocks = call.metadata.block_table[request].long()[tokens // page]
    entries = poison((len(tokens), cache.shape[2]), cache.dtype, cache.device, kind)
    # As bytes, since float8 cannot be indexed everywhere.
    cache.view(torch.uint8)[blocks, tokens % page] = entries.view(torch.uint8)
