"""A whole MLA layer: cache, prefills and decodes in one batch, weights, padding and graphs."""

from dataclasses import replace

import pytest

from mla_conformance.cases.layer import LayerCase
from mla_conformance.problems.build import build_problem
from mla_conformance.trials.layer_blocks import moves_blocks, shapes_cache
from mla_conformance.trials.layer_graph import replays
from mla_conformance.trials.layer_packed import loads_packed
from mla_conformance.trials.trial import Trial


@pytest.mark.capability("mixed_batch")
def test_mixed_batch(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("cache_write")
def test_cache_write(trial: Trial) -> None:
    trial.conforms()
    shapes_cache(trial)
    moves_blocks(trial)


@pytest.mark.capability("weight_absorption")
def test_weight_absorption(trial: Trial) -> None:
    trial.conforms()
    trial.conforms(trial.redrawn_problem(), step="after the weights were replaced in place")
    loads_packed(trial)


@pytest.mark.capability("prefill_decode_agreement")
def test_prefill_decode_agreement(trial: Trial) -> None:
    trial.conforms(step="as decodes")
    assert isinstance(trial.case, LayerCase)
    as_prefills = build_problem(replace(trial.case, decodes=0), trial.subject.device)
    trial.conforms(as_prefills, step="the same tokens as prefills")


@pytest.mark.capability("graph_padding")
def test_graph_padding(trial: Trial) -> None:
    trial.conforms()


@pytest.mark.capability("graph_replay")
def test_graph_replay(trial: Trial) -> None:
    replays(trial)
