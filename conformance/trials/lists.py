"""Sparse attention with other lists: what a list means does not depend on its order, its padding or other rows."""

from collections.abc import Callable
from dataclasses import replace

import torch

from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.trials.trial import Trial


def reversed_lists(problem: Problem) -> Problem:
    """Every list the other way round, up to its length; what it means stays the same."""

    def reverse(call: SparseCall) -> SparseCall:
        columns = _columns(call).expand_as(call.topk_indices)
        length = torch.full_like(columns[:, :1], columns.shape[1])
        if call.length is not None:
            length = call.length.long().unsqueeze(1)
        order = torch.where(columns < length, length - 1 - columns, columns)
        return call.given_otherwise(topk_indices=call.topk_indices.gather(1, order))

    return _changed(problem, reverse, problem.key)


def widened_lists(problem: Problem, columns: int) -> Problem:
    """So many columns of -1 behind every list; what it means stays the same."""

    def widened(call: SparseCall) -> SparseCall:
        behind = call.topk_indices.new_full((len(call.topk_indices), columns), NO_KEY)
        return call.given_otherwise(topk_indices=torch.cat((call.topk_indices, behind), dim=1))

    return _changed(problem, widened, problem.key)


def half_lists(problem: Problem, half: int) -> Problem:
    """Every second key of each list, the others -1; 0 for the first and every second behind it, 1 for the rest."""
    return _kept(problem, lambda call: _columns(call).expand_as(call.topk_indices) % 2 == half, f"half={half}")


def lonely_row(problem: Problem, row: int) -> Problem:
    """The lists of all other rows name nothing."""

    def kept(call: SparseCall) -> torch.Tensor:
        rows = torch.arange(len(call.topk_indices), device=call.topk_indices.device).unsqueeze(1)
        return rows.expand_as(call.topk_indices) == row

    return _kept(problem, kept, f"row={row}")


def _columns(call: SparseCall) -> torch.Tensor:
    return torch.arange(call.topk_indices.shape[1], device=call.topk_indices.device)


def _kept(problem: Problem, kept: Callable[[SparseCall], torch.Tensor], said: str) -> Problem:
    """The lists of the first cache without what is not ``kept`` [T, K]."""

    def blanked(call: SparseCall) -> SparseCall:
        own, rest = call.selected.tensor_split([call.topk_indices.shape[1]], dim=1)
        counted = kept(call)
        selected = torch.cat((own.masked_fill(~counted, NO_KEY), rest), dim=1)
        if call.length is not None:
            counted = counted | (_columns(call) >= call.length.unsqueeze(1))
        blank = call.given_otherwise(topk_indices=call.topk_indices.masked_fill(~counted, NO_KEY))
        return replace(blank, selected=selected)

    return _changed(problem, blanked, f"{problem.key}|{said}")


def _changed(problem: Problem, change: Callable[[SparseCall], SparseCall], key: str) -> Problem:
    def changed(call: KernelCall) -> SparseCall:
        assert isinstance(call, SparseCall)
        return change(call)

    return replace(problem, key=key, calls=tuple(map(changed, problem.calls)))


def selection_order(trial: Trial) -> None:
    """The lists as given and the other way round, then each half of every list."""
    trial.conforms(step="as given")
    trial.conforms(reversed_lists(trial.problem), step="every list reversed")
    if not trial.case.is_merged:
        for half, said in enumerate(("first", "second")):
            trial.conforms(half_lists(trial.problem, half), step=f"every second key of each list, from the {said} on")


def selection_padding(trial: Trial) -> None:
    """The lists as given, and with as many columns of -1 behind them, if the backend takes lists so wide."""
    case = trial.case
    assert isinstance(case, SparseCase)
    trial.conforms(step="as given")
    if not trial.unsupported(replace(case, topk=2 * case.topk)):
        trial.conforms(widened_lists(trial.problem, case.topk), step="as many columns of -1 behind every list")


def selection_rows(trial: Trial) -> None:
    """Each row while all others name nothing."""
    trial.conforms(step="as given")
    for row in range(trial.problem.query_start_loc[-1]):
        trial.conforms(lonely_row(trial.problem, row), step=f"row {row}, while no other names a key")
