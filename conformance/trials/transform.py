"""Problems made from problems: the same inputs regrouped, scaled, listed otherwise or rewritten in place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_conformance.cases.cached import CachedCase
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.ranks import CallOnRanks
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.sparse.problem import SparseCall


def regroup(problem: Problem, requests: Sequence[int], queries: int | None = None) -> Problem:
    """These requests of a problem of one call, in this order, each cut to its first ``queries`` new tokens."""
    regrouped = problem.calls[0].regrouped(problem.case, requests, queries)
    return replace(problem, key=f"{problem.key}|requests={list(requests)}|queries={queries}", calls=(regrouped,))


def scale_values(problem: Problem, factor: float) -> Problem:
    """All values times a power of two, which is exact."""
    calls = tuple(replace(call, v=call.v * factor) for call in problem.attention)
    return replace(problem, key=f"{problem.key}|values={factor}", calls=calls)


def scale_cache(problem: Problem, factor: float) -> Problem:
    """The same decode with ``k_scale`` times a power of two, which only the keys of an fp8 cache know: exactly."""
    assert isinstance(problem.case, CachedCase)
    meant, calls = factor if problem.case.cache == "fp8" else 1.0, []
    for call in problem.calls:
        assert isinstance(call, DecodeCall | SparseCall)
        rescaled = call.given_otherwise(k_scale=call.k_scale * factor)
        calls.append(replace(rescaled, k=call.k * meant, v=call.v * meant))
    whole = problem.whole and replace(problem.whole, k=problem.whole.k * meant, v=problem.whole.v * meant)
    return replace(problem, key=f"{problem.key}|k_scale={factor}", calls=tuple(calls), whole=whole)


def overwrite(problem: Problem, other: Problem) -> Problem:
    """The tensors of ``problem`` with the values of ``other``, of the same shapes: same addresses, other contents."""
    calls = tuple(mine.overwritten(theirs) for mine, theirs in zip(problem.calls, other.calls, strict=True))
    return replace(problem, key=other.key, calls=calls, whole=other.whole)


def over_metadata(problem: Problem, owner: Problem) -> Problem:
    """``problem`` with the metadata objects of ``owner``, whose batch stands in the same blocks."""

    def over(call: Any, theirs: Any) -> Any:
        if isinstance(call, CallOnRanks):  # each has metadata of its own
            return call.of(tuple(map(over, call.parts, theirs.parts)))
        return replace(call, metadata=theirs.metadata)

    return replace(problem, calls=tuple(map(over, problem.calls, owner.calls)))


def _sparse_calls(problem: Problem) -> Iterator[tuple[SparseCall, torch.Tensor]]:
    """Each call, and the columns [K] of its lists."""
    for call in problem.calls:
        assert isinstance(call, SparseCall)
        yield call, torch.arange(call.topk_indices.shape[1], device=call.topk_indices.device)


def reversed_lists(problem: Problem) -> Problem:
    """Every list the other way round, up to its length; what it means stays the same."""
    calls = []
    for call, columns in _sparse_calls(problem):
        length = torch.tensor(len(columns)) if call.topk_length is None else call.topk_length.long().unsqueeze(1)
        order = torch.where(columns < length, length - 1 - columns, columns).expand_as(call.topk_indices)
        calls.append(call.given_otherwise(topk_indices=call.topk_indices.gather(1, order)))
    return replace(problem, calls=tuple(calls))


def widened_lists(problem: Problem, columns: int) -> Problem:
    """So many columns of -1 behind every list; what it means stays the same."""
    calls = []
    for call, _ in _sparse_calls(problem):
        behind = call.topk_indices.new_full((len(call.topk_indices), columns), NO_KEY)
        calls.append(call.given_otherwise(topk_indices=torch.cat((call.topk_indices, behind), dim=1)))
    return replace(problem, calls=tuple(calls))


def half_lists(problem: Problem, half: int) -> Problem:
    """Every second key of each list, the others -1; 0 for the first and every second behind it, 1 for the rest."""
    return _blanked(problem, lambda rows, columns: columns % 2 == half, f"half={half}")


def lonely_row(problem: Problem, row: int) -> Problem:
    """The lists of all other rows name nothing."""
    return _blanked(problem, lambda rows, columns: rows == row, f"row={row}")


def _blanked(problem: Problem, kept: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], said: str) -> Problem:
    """The lists of the first cache without what is not ``kept``, as told of rows [T, 1] and columns [K]."""
    calls = []
    for call, columns in _sparse_calls(problem):
        rows = torch.arange(len(call.topk_indices), device=columns.device).unsqueeze(1)
        counted = kept(rows, columns).expand_as(call.topk_indices)
        own, rest = call.selected.tensor_split([len(columns)], dim=1)
        selected = torch.cat((own.masked_fill(~counted, NO_KEY), rest), dim=1)
        if call.topk_length is not None:
            counted = counted | (columns >= call.topk_length.unsqueeze(1))
        blank = call.given_otherwise(topk_indices=call.topk_indices.masked_fill(~counted, NO_KEY))
        calls.append(replace(blank, selected=selected))
    return replace(problem, key=f"{problem.key}|{said}", calls=tuple(calls))
