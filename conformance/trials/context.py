"""What the trials of a process share: inputs and golden results, made once for all backends of a case.

Nothing that is kept is handed to a backend: each trial gets a copy of the inputs.
"""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from mla_conformance.cases.case import Case
from mla_conformance.judging.golden import Golden
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import build_problem, golden_of

Value = TypeVar("Value")

PROBLEM_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Memory that inputs may keep, by type of device; larger ones are built each time."""
GOLDEN_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Memory that golden results may keep, by type of device; the last one is kept in any case."""


@dataclass(eq=False)
class BoundedCache(Generic[Value]):
    """Values by key, within so many bytes; the one that was used longest ago goes first."""

    _entries: OrderedDict[tuple[str, str], tuple[Value, int]] = field(default_factory=OrderedDict)

    def find(self, key: tuple[str, str]) -> Value | None:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def keep(self, key: tuple[str, str], value: Value, tensors: Iterable[torch.Tensor], limit: int) -> None:
        """Keep a value that consists of ``tensors``, and of the others as many as ``limit`` bytes leave room for."""
        storages = map(torch.Tensor.untyped_storage, tensors)
        self._entries[key] = value, sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        while len(self._entries) > 1 and sum(size for _, size in self._entries.values()) > limit:
            self._entries.popitem(last=False)

    def forget(self) -> None:
        self._entries.clear()


@dataclass(eq=False)
class Context:
    salt: str = ""  # what inputs are drawn with beside their case; empty for none
    _problems: BoundedCache[Problem] = field(default_factory=BoundedCache)
    _golden: BoundedCache[Golden] = field(default_factory=BoundedCache)

    def problem(self, case: Case, device: torch.device) -> Problem:
        """The inputs that a case stands for, in tensors that nothing else refers to.

        Raises:
            ProblemError: a regime or dtype that does not exist here.
            ValueError: the reference's chunk planner or cache refuses the case.
        """
        key = (case.id, str(device))
        untouched = self._problems.find(key)
        if untouched is None:
            untouched = build_problem(case, device, self.salt)
            if untouched.memory > PROBLEM_BYTES[device.type]:
                return untouched
            self._problems.keep(key, untouched, untouched.tensors(), PROBLEM_BYTES[device.type])
        return deepcopy(untouched, {id(untouched.case): untouched.case})

    def expect(self, problem: Problem) -> Golden:
        """The golden result of a problem; a kept one is returned without a word to the device, which may be lost."""
        key = (problem.key, str(problem.device))
        found = self._golden.find(key)
        if found is None:
            found = golden_of(problem)
            self._golden.keep(key, found, found.tensors, GOLDEN_BYTES[problem.device.type])
        return found

    def forget(self) -> None:
        self._problems.forget()
        self._golden.forget()
