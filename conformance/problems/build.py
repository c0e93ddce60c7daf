"""From a case to the tensors that it stands for."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.problems.decode import decode_problem
from mla_conformance.problems.indexer import indexer_problem
from mla_conformance.problems.layer import layer_problem
from mla_conformance.problems.prefill import prefill_problem
from mla_conformance.problems.problem import Problem
from mla_conformance.problems.sparse import sparse_problem

_BUILDERS: Mapping[Role, Callable[[Any, torch.device, str], Problem]] = {
    Role.PREFILL: prefill_problem,
    Role.DECODE: decode_problem,
    Role.LAYER: layer_problem,
    Role.SPARSE: sparse_problem,
    Role.INDEXER: indexer_problem,
}


def build_problem(case: Case, device: torch.device, salt: str = "") -> Problem:
    """The inputs that a case stands for; the same bytes on every device, in tensors that nothing else refers to.

    Args:
        case: the case.
        device: where the tensors are.
        salt: what their values are drawn with beside the case; each has values of its own.

    Raises:
        ProblemError: a regime or dtype that does not exist here.
        ValueError: the reference's chunk planner or cache refuses the case.
    """
    return _BUILDERS[case.role](case, device, salt)
