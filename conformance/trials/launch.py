"""A call without the driver's synchronisation and snapshots, for tests that place it on a stream or in a graph."""

from typing import Any

import torch

from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.problems.problem import Problem


def prepare(backend: Any, problem: Problem) -> None:
    """Hand over the metadata of the problem's only call."""
    problem.calls[0].prepare(backend)


def invoke(backend: Any, problem: Problem) -> Any:
    """Make the problem's only call; what the backend returns, possibly still being computed."""
    return problem.calls[0].invoke(backend, None)


def prepared_call(backend: Any, problem: Problem) -> Any:
    """Both."""
    prepare(backend, problem)
    return invoke(backend, problem)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    found = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def cut(value: Any, rows: slice) -> Any:
    """These rows of an output [T, N, V], and of an LSE [N, T] if there is one; anything else as it is."""
    parts = tensors(value)
    if isinstance(value, torch.Tensor):
        return value[rows]
    whole = isinstance(value, tuple | list) and parts and len(parts) == len(value)
    return (parts[0][rows], *(lse[..., rows] for lse in parts[1:])) if whole else value


def observed(problem: Problem, value: Any) -> Observation:
    """What a call returned, as the judge takes it."""
    return Observation((Returned(problem.calls[0], value),), None, ())
