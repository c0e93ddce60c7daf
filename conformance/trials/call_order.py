"""Many calls of one instance and several instances: a result depends on its call and the metadata last prepared."""

from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Call, Layout
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.layer.call import LayerCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials.transform import (
    of_size,
    other_contents,
    over_metadata,
    overwrite,
    scale_cache,
    shortened,
)
from mla_conformance.trials.trial import Trial

_BATCHES = 14
"""Between the first call and the first again: a kernel may remember a dozen."""


def call_order(trial: Trial) -> None:
    """Calls before and between must not matter."""
    trial.conforms(step="first call")
    layout = Layout.PACKED if trial.case.layout != Layout.PACKED else Layout.SLICED
    trial.conforms(trial.build(replace(trial.case, layout=layout)), step="same shapes in another memory layout")
    trial.conforms(trial.other_problem(), step="other lengths")
    trial.conforms(step="first call again")
    _many_batches(trial)
    _layers_of_a_step(trial)
    trial.interleaved(trial.other_problem())
    trial.interleaved(trial.build(replace(trial.case, scale=2 * trial.case.scale)), "of another softmax scale")
    if trial.case.call in (Call.DECODE, Call.SPARSE_DECODE):
        trial.conforms(scale_cache(trial.problem, 2.0), step="another k_scale, everything else the same")
    trial.conforms(overwrite(trial.problem, trial.redrawn_problem()), step="same addresses, other contents")


def _many_batches(trial: Trial) -> None:
    """Batches of other lengths, of a kernel larger and smaller ones in turn, and the first call."""
    case, requests = trial.case, len(trial.case.q)
    sizes = cycle((2 * requests + 1, requests + 1, 1, requests + 2, requests))
    for number, size in enumerate(islice(sizes, _BATCHES), 1):
        # A layer's batch is bound to its order and workspace.
        other = case if case.role in (Role.LAYER, Role.SPARSE_LAYER) else of_size(case, size)
        step = f"batch {number} of other lengths, of {len(other.q)} requests"
        trial.conforms(trial.build(shortened(other, number)), step=step)
    trial.conforms(step=f"first call again, after {_BATCHES} other batches")


def _layers_of_a_step(trial: Trial) -> None:
    """A batch prepared once, computed for several layers: each has contents of its own, and weights if it is whole."""
    first, other = trial.build(), trial.build(other_contents(trial.case))
    if trial.case.role is not Role.LAYER:
        other = over_metadata(other, first)
    trial.conforms(first, step="prepared once")
    trial.conforms(other, step="prepared once, another layer's operands and cache", prepare=False)
    trial.conforms(overwrite(first, other), step="prepared once, other contents at the same addresses", prepare=False)
    if trial.case.role is not Role.LAYER:
        trial.interleaved(over_metadata(other, trial.problem), "over the same metadata")
    elif isinstance(trial.problem.calls[0], LayerCall):
        _second_layer(trial)


def _second_layer(trial: Trial) -> None:
    """A layer of other weights gets the metadata that the first one's builder made, and its own builder makes none."""
    case = other_contents(trial.case)
    assert isinstance(case, LayerCase)
    problem = trial.build(replace(case, model=case.model + 1))
    layer, expectation = trial.create(problem.case), trial.expect(problem)
    trial.conforms(step="the first of two layers")
    trial.make("a second layer", partial(_lend, trial.backend, layer, problem))
    step = "the second of two layers, over the metadata of the first"
    trial.judged(problem, expectation, trial.run(layer, problem, prepare=False), step)
    trial.conforms(step="the first of two layers again", prepare=False)


def _lend(owner: Any, layer: Any, problem: Problem) -> None:
    call: Any = problem.calls[0]
    call.load(layer)
    layer.metadata = owner.metadata
