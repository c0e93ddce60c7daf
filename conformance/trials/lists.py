"""Sparse attention with other lists: what a list means does not depend on its order, its padding or other rows."""

from dataclasses import replace

from mla_conformance.roles.sparse.case import SparseCase
from mla_conformance.roles.sparse.reselected import half_lists, lonely_row, reversed_lists, widened_lists
from mla_conformance.trials.trial import Trial


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
