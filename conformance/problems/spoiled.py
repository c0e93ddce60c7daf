"""One request's inputs made unusable in place: not a number, infinite, or as large as the dtype allows."""

from collections.abc import Sequence
from functools import singledispatch

import torch

from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.decode_call import DecodeCall
from mla_conformance.problems.indexer_call import IndexerCall
from mla_conformance.problems.memory import poison
from mla_conformance.problems.operands import segments
from mla_conformance.problems.prefill_call import PrefillCall
from mla_conformance.problems.problem import Problem
from mla_conformance.problems.sparse_call import SparseCall
from mla_conformance.reference.kv_cache import write_entries

KINDS = ("nan", "inf", "largest")
"""What spoiled values are, in turn; codes, which know no infinity, are never numbers."""


def spoil_queries(problem: Problem, request: int, kind: str) -> None:
    """Every query of a request, in every call."""
    for call in problem.calls:
        for tensor in call.query_operands():
            _spoil_rows(tensor, call.query_start_loc, request, kind)


def spoil_keys(problem: Problem, request: int, kind: str) -> None:
    """Every key and value of a request, in every call: of a decode its entries of the cache."""
    for call in problem.calls:
        _spoil_keys(call, request, kind)


@singledispatch
def _spoil_keys(call: KernelCall, request: int, kind: str) -> None:
    raise TypeError(f"expected a call whose keys are handed over, got a {type(call).__name__}")


@_spoil_keys.register
def _(call: PrefillCall, request: int, kind: str) -> None:
    for tensor in (call.k, call.v):
        _spoil_rows(tensor, call.key_start_loc, request, kind)


@_spoil_keys.register
def _(call: DecodeCall, request: int, kind: str) -> None:
    cache, page = call.kv_cache, call.kv_cache.shape[1]
    tokens = torch.arange(int(call.metadata.seq_lens_cpu[request]), device=cache.device)
    blocks = call.metadata.block_table[request].long()[tokens // page]
    entries = poison((len(tokens), cache.shape[2]), cache.dtype, cache.device, kind)
    # As bytes, since float8 cannot be indexed everywhere.
    cache.view(torch.uint8)[blocks, tokens % page] = entries.view(torch.uint8)


@_spoil_keys.register
def _(call: SparseCall, request: int, kind: str) -> None:
    slots = call.slots[list(segments(call.key_start_loc))[request]].to(call.kv_cache.device)
    entries = poison((len(slots), call.kv_cache.shape[2]), call.kv_cache.dtype, call.kv_cache.device, kind)
    write_entries(call.kv_cache, entries, slots, call.case.cache)


@_spoil_keys.register
def _(call: IndexerCall, request: int, kind: str) -> None:
    slots = call.slots[list(segments(call.key_start_loc))[request]].to(call.stored.device)
    entries = poison((len(slots), call.stored.shape[-1]), call.stored.dtype, call.stored.device, kind)
    stored = call.stored if call.case.is_paged else call.stored.unsqueeze(1)
    write_entries(stored, entries, slots, call.case.cache if call.case.is_paged else "auto")


def _spoil_rows(tensor: torch.Tensor, starts: Sequence[int], request: int, kind: str) -> None:
    rows = tensor[list(segments(starts))[request]]
    rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))
