"""Golden states that were computed before: the last ones are kept in memory."""

from collections.abc import Callable, Iterator

import torch

from mla_conformance.problems.kept import Kept
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import AttentionState

KEPT_BYTES = {"cpu": 2**28, "cuda": 2**32}
"""Memory that golden states may keep, by type of device; the last one is kept in any case."""

States = tuple[tuple[AttentionState, ...], AttentionState | None]
"""Of each call of a problem, and of all merged."""


class GoldenCache:
    """States by problem and device."""

    def __init__(self) -> None:
        self._kept = Kept[States]()

    def get(self, problem: Problem, compute: Callable[[], States]) -> States:
        """The states of a problem: from memory, or computed and kept."""
        key = (problem.key, str(problem.device))
        found = self._kept.find(key)
        if found is not None:
            return found
        states = compute()
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(states))
        return self._kept.keep(key, states, size, KEPT_BYTES[problem.device.type])

    def forget(self) -> None:
        """Forget what is in memory."""
        self._kept.forget()


def _tensors(states: States) -> Iterator[torch.Tensor]:
    calls, merged = states
    for state in (*calls, *([merged] if merged else [])):
        yield from (state.output, state.lse)
        yield from state.terms.by_name().values() if state.terms else ()
