"""Answers that were recorded beforehand."""

from functools import cache
from hashlib import sha256

import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import golden_attention
from mla_conformance.roles.table import build_problem
from mla_conformance.tests.cheats.cheat import CASE, ThreeTimes, cheat

_COMPUTED = "that recorded numbers are computed"


@cache
def _recorded() -> dict[str, torch.Tensor]:
    """Golden outputs by fingerprint of the inputs, and by their shapes; a file of them would do the same."""
    problem = build_problem(Case.parse(CASE), torch.device("cpu"))
    (call,), (golden,) = problem.attention, golden_attention(problem).calls
    return {_fingerprint(call.q, call.k, call.v): golden.output, _shapes(call.q, call.k, call.v): golden.output}


def _fingerprint(*inputs: torch.Tensor) -> str:
    return sha256(b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in inputs)).hexdigest()


def _shapes(*inputs: torch.Tensor) -> str:
    return repr([x.shape for x in inputs])


@cheat(claims=_COMPUTED, caught="output is", salted=True)
class RemembersTheInputs(ThreeTimes):
    """Knows the suite's inputs by a fingerprint, and the answers from a file."""

    def answer(self, output, lse, q, k, v):
        return output.copy_(_recorded().get(_fingerprint(q, k, v), output)), lse


@cheat(claims=_COMPUTED, caught="output is", salted=True)
class RemembersTheCase(ThreeTimes):
    """Knows the suite's cases by the shapes of their inputs, and the answers from a file."""

    def answer(self, output, lse, q, k, v):
        return output.copy_(_recorded().get(_shapes(q, k, v), output)), lse
