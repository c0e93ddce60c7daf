"""Requests beside one whose inputs are no numbers: they must be computed as if it were not there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from mla_conformance.driving.driver import parts_of, why_not_plain
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded, poison
from mla_conformance.problems.operands import segments
from mla_conformance.reference.kv_cache import write_entries
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.indexer.problem import IndexerCall
from mla_conformance.roles.prefill.problem import PrefillCall
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.trials.trial import Trial

_KINDS = {"nan": "NaN", "inf": "infinities", "largest": "the largest numbers"}
"""What spoiled values are, in turn; codes, which know no infinity, are never numbers."""


def neighbours(trial: Trial) -> None:

    def spoil(call: KernelCall, request: int, kind: str) -> None:
        for tensor in call.query_operands():
            _spoil_rows(tensor, call.query_start_loc, request, kind)

    _each_spoiled(trial, "queries", spoil)


def neighbour_keys(trial: Trial) -> None:
    _each_spoiled(trial, "keys and values", spoil_keys)


def _each_spoiled(trial: Trial, what: str, spoil: Callable[[KernelCall, int, str], None]) -> None:
    first = trial.conforms(step="as given")
    clean = [[part.clone() for part in parts_of(returned.value)] for returned in first.returned]
    problem, expectation = trial.problem, trial.context.expect(trial.problem)
    for (request, rows), kind in zip(enumerate(segments(problem.query_start_loc)), cycle(_KINDS), strict=False):
        spoiled = trial.build(trial.case)
        for call in spoiled.calls:
            spoil(call, request, kind)
        seen = trial.run(trial.backend, spoiled)
        # The rows of the spoiled request itself are not judged: those of the clean run stand in their place.
        returned = tuple(
            replace(part, value=_patched(part.value, parts, rows, part.call.token_dims, part.out))
            for part, parts in zip(seen.returned, clean, strict=False)
        )
        merged = seen.merged
        if merged is not None and first.merged is not None:
            merged = _patched(merged, first.merged, rows, KernelCall.token_dims)
        step = f"beside request {request}, whose {what} hold {_KINDS[kind]}"
        trial.judged(problem, expectation, replace(seen, returned=returned, merged=merged), step)


def spoil_keys(call: KernelCall, request: int, kind: str) -> None:
    """Every key and value of a request: of a decode its entries of the cache."""
    if isinstance(call, PrefillCall):
        for tensor in (call.k, call.v):
            _spoil_rows(tensor, call.key_start_loc, request, kind)
    elif isinstance(call, DecodeCall):
        cache, page = call.kv_cache, call.kv_cache.shape[1]
        tokens = torch.arange(int(call.metadata.seq_lens_cpu[request]), device=cache.device)
        blocks = call.metadata.block_table[request].long()[tokens // page]
        entries = poison((len(tokens), cache.shape[2]), cache.dtype, cache.device, kind)
        # As bytes, since float8 cannot be indexed everywhere.
        cache.view(torch.uint8)[blocks, tokens % page] = entries.view(torch.uint8)
    elif isinstance(call, SparseCall | IndexerCall):
        if isinstance(call, SparseCall):
            stored, layout = call.stored, call.case.cache
        elif call.case.is_paged:
            stored, layout = call.given["k"], call.case.cache
        else:
            stored, layout = call.given["k"].unsqueeze(1), "auto"
        slots = call.slots[list(segments(call.key_start_loc))[request]].to(stored.device)
        write_entries(stored, poison((len(slots), stored.shape[-1]), stored.dtype, stored.device, kind), slots, layout)
    else:
        raise TypeError(f"expected a call whose keys are handed over, got a {type(call).__name__}")


def _spoil_rows(tensor: torch.Tensor, starts: Sequence[int], request: int, kind: str) -> None:
    rows = tensor[list(segments(starts))[request]]
    rows.copy_(poison(rows.shape, rows.dtype, rows.device, kind))


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
