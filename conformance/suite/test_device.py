"""What only a GPU has: captured graphs, streams, and operands of its size."""

import pytest

from mla_conformance.trials.far import judge_far_away
from mla_conformance.trials.graph import replays
from mla_conformance.trials.streams import side_stream, two_streams
from mla_conformance.trials.trial import Trial


@pytest.mark.capability("cuda_graph")
def test_cuda_graph(trial: Trial) -> None:
    replays(trial)


@pytest.mark.capability("streams")
def test_streams(trial: Trial) -> None:
    side_stream(trial)
    two_streams(trial, trial.other_problem())


@pytest.mark.capability("large_offsets")
def test_large_offsets(trial: Trial) -> None:
    judge_far_away(trial)


@pytest.mark.capability("many_rows")
def test_many_rows(trial: Trial) -> None:
    trial.conforms()
