"""All roles, and what is asked of whichever a case is of."""

from importlib import import_module

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.roles import ROLES
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation
from mla_conformance.judging import golden, steps, tolerance, verdict
from mla_conformance.problems.calls import Problem
from mla_conformance.roles.definition import RoleDefinition


class _Definitions(dict[str, RoleDefinition]):
    def __missing__(self, role: str) -> RoleDefinition:
        if role not in ROLES or ROLES[role].file:
            raise KeyError(role)
        self[role] = getattr(import_module(f"mla_conformance.roles.{role}.problem"), role.upper())
        return self[role]


DEFINITIONS = _Definitions()  # one from outside joins them (``trials/role_file.py``)


def build_problem(case: Case, device: torch.device, salt: str = "") -> Problem:
    """The inputs that a case stands for; the same bytes on every device, in tensors that nothing else refers to.

    ProblemError of a regime or dtype that does not exist here, ValueError where the reference refuses the case.
    """
    batch = DEFINITIONS[case.role].batch(case, device, salt)
    return Problem(case, batch.key, device, batch.calls(), batch.whole)


def golden_of(problem: Problem) -> golden.Golden:
    return DEFINITIONS[problem.case.role].golden(problem)


def judge(
    problem: Problem, expectation: golden.Golden, observation: Observation, declaration: Declaration
) -> verdict.Verdict:
    judging = DEFINITIONS[problem.case.role].judge
    return judging(problem, expectation, declaration, tolerance.tolerance()).verdict(observation)


def measure(
    problem: Problem, expectation: golden.Golden, observation: Observation, declaration: Declaration
) -> list[steps.Measured]:
    """The numbers that were returned, part by part; none if what was returned has not the form that it must have."""
    examined = DEFINITIONS[problem.case.role].judge(problem, expectation, declaration, tolerance.tolerance())
    if observation.merge_error or any(map(examined.form, observation.returned)):
        return []
    return list(examined.measured(observation))
