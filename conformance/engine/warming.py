"""Using a GPU once, before a case does: what is loaded when it is used first takes a second."""

import contextlib
from itertools import islice

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.roles.table import judge
from mla_conformance.trials.context import Clock, Context

_USUAL = "lse:q=[4]"


def warm_up(context: Context, device: torch.device) -> None:
    """Do on a device what is done for each case, without a backend: the results are the golden ones."""
    with contextlib.suppress(Exception):  # the first case tells what is wrong
        problem = context.problem(Case.parse(_USUAL), device, Clock())
        expected = context.expect(problem, Clock())
        output, lse = islice(expected.tensors, 2)
        results = output.to(problem.output_dtype), lse.float()
        judge(problem, expected, Observation((Returned(problem.calls[0], results),), None, ()), Declaration())
