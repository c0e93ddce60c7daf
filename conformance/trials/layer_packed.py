"""A layer over weights that are stored in codes, under another name than dense ones."""

from dataclasses import replace
from functools import partial

from mla_conformance.problems.layer_call import LayerCall
from mla_conformance.trials.trial import Trial


def loads_packed(trial: Trial) -> None:
    """A new layer computes the same from the same weights in codes."""
    step = "with the weights in codes"
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    packed = replace(trial.problem, calls=(replace(call, packed=True),))
    layer = trial.made(f"{step}: the constructor", partial(trial.subject.create, trial.case))
    expectation = trial.expect(packed)
    trial.judged(packed, expectation, trial.run(layer, packed), step)
