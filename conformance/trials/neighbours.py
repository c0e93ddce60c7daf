"""Requests beside one whose inputs are no numbers: they must be computed as if it were not there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from itertools import cycle
from typing import Any

import torch

from mla_conformance.driving.driver import Observation, OutputAndLse, parts_of, why_not_plain
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import segments
from mla_conformance.reference.kv_cache import write_entries
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.indexer.problem import IndexerCall
from mla_conformance.roles.prefill.problem import PrefillCall
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.trials.trial import Trial

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
    slots = call.slots[list(segments(call.key_start_loc))[request]].to(call.stored.device)
    entries = poison((len(slots), call.stored.shape[2]), call.stored.dtype, call.stored.device, kind)
    write_entries(call.stored, entries, slots, call.case.cache)


@_spoil_keys.register
def _(call: IndexerCall, request: int, kind: str) -> None:
    stored = call.given["k"] if call.case.is_paged else call.given["k"].unsqueeze(1)
    slots = call.slots[list(segments(call.key_start_loc))[request]].to(stored.device)
    entries = poison((len(slots), stored.shape[-1]), stored.dtype, stored.device, kind)
    write_entries(stored, entries, slots, call.case.cache if call.case.is_paged else "auto")


def _spoil_rows(tensor: torch.Tensor, starts: Sequence[int], request: int, kind: str) -> None:
    rows = tensor[list(segments(starts))[request]]
    rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))


_SAID = dict(zip(KINDS, ("NaN", "infinities", "the largest numbers"), strict=True))


def neighbours(trial: Trial) -> None:
    """Each request in turn has queries that are no numbers, or huge."""
    _each_spoiled(trial, "queries", spoil_queries)


def neighbour_keys(trial: Trial) -> None:
    """Each request in turn has keys and values that are no numbers, or huge."""
    _each_spoiled(trial, "keys and values", spoil_keys)


def _each_spoiled(trial: Trial, what: str, spoil: Callable[[Problem, int, str], None]) -> None:
    clean = _Clean(trial.conforms(step="as given"))
    expectation = trial.context.expect(trial.problem)
    for (request, rows), kind in zip(enumerate(segments(trial.problem.query_start_loc)), cycle(KINDS), strict=False):
        problem = trial.build(trial.case)
        spoil(problem, request, kind)
        seen = clean.excusing(rows, trial.run(trial.backend, problem))
        trial.judged(trial.problem, expectation, seen, f"beside request {request}, whose {what} hold {_SAID[kind]}")


class _Clean:
    """The results of a run in which nothing was spoiled."""

    def __init__(self, observation: Observation) -> None:
        self._parts = [[part.clone() for part in parts_of(returned.value)] for returned in observation.returned]
        self._merged = observation.merged

    def excusing(self, rows: slice, observation: Observation) -> Observation:
        """``observation`` with the clean results in ``rows``, the spoiled request's own, which are not judged."""
        returned = tuple(
            replace(part, value=_patched(part.value, clean, rows, part.call.token_dims, part.out))
            for part, clean in zip(observation.returned, self._parts, strict=False)
        )
        merged: OutputAndLse | None = observation.merged
        if merged is not None and self._merged is not None:
            merged = _patched(merged, self._merged, rows, KernelCall.token_dims)
        return replace(observation, returned=returned, merged=merged)


def _patched(
    value: Any, clean: Sequence[torch.Tensor], rows: slice, dims: Sequence[int], out: Guarded | None = None
) -> Any:
    """The parts of a result, which count tokens in ``dims``, with the rows of ``clean``; anything else as it is."""
    parts = parts_of(value)
    if any(map(why_not_plain, parts)) or [x.shape for x in parts] != [x.shape for x in clean]:
        return value
    # What lies in the output tensor that was handed in must stay there.
    given = out and out.storage.untyped_storage().data_ptr()
    patched = [part if part.untyped_storage().data_ptr() == given else part.clone() for part in parts]
    for mine, theirs, dim in zip(patched, clean, dims, strict=False):
        count = rows.stop - rows.start
        mine.narrow(dim, rows.start, count).copy_(theirs.narrow(dim, rows.start, count))
    return tuple(patched) if len(patched) > 1 else patched[0]
