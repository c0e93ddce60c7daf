"""What every result is judged by, in this order: exceptions and form, its numbers, what else the calls wrote."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from mla_conformance.backends.foreign import type_name
from mla_conformance.driving.driver import Observation, Returned, is_tensor, kind_of, parts_of, why_not_plain
from mla_conformance.judging.diagnosis import explain_form
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.measured import Measured
from mla_conformance.judging.verdict import BudgetUse, Check, Status, Verdict, failed
from mla_conformance.problems.problem import Problem

Form = list[tuple[str, torch.Size, torch.dtype]]  # what each tensor of a result is called, its shape and its dtype


class Steps(ABC):
    """The steps of one verdict; the first that fails decides."""

    writes: ClassVar[Check] = Check.CACHE  # the check of what a call writes beside its result

    def __init__(self, problem: Problem, expected: Golden) -> None:
        self.problem, self.rows = problem, expected.rows
        self.used = BudgetUse()

    def verdict(self, observation: Observation) -> Verdict:
        for verdict in self._steps(observation):
            if verdict is not None:
                return replace(verdict, sampled=self.rows.to_json())
        return Verdict(Status.PASS, used=self.used, sampled=self.rows.to_json())

    def has_form(self, observation: Observation) -> bool:
        """Whether every call returned tensors that can be compared with golden ones."""
        return all(_raised(returned) is None and self._form(returned) is None for returned in observation.returned)

    @abstractmethod
    def measured(self, observation: Observation) -> Iterator[Measured]:
        """The numbers that were returned, as far as they can be compared; of an observation whose form is right."""

    @abstractmethod
    def _expected_form(self, returned: Returned) -> Form:
        """What a call has to return."""

    @abstractmethod
    def _numbers(self, observation: Observation) -> Iterator[Verdict | None]:
        """Failures of the numbers, None for each step that holds."""

    def _steps(self, observation: Observation) -> Iterator[Verdict | None]:
        for returned in observation.returned:
            yield _raised(returned)
            yield self._form(returned)
        yield from self._numbers(observation)
        for returned in observation.returned:
            if returned.out is None:
                continue
            output, name = parts_of(returned.value)[0], returned.call.name
            if output.untyped_storage().data_ptr() != returned.out.storage.untyped_storage().data_ptr():
                yield failed(Check.OUT_TENSOR, f"{name}: the result does not share the storage of out=")
            elif overrun := returned.out.overrun():
                yield failed(Check.OUT_OF_BOUNDS_WRITE, f"{name}: {overrun} bytes around out= were overwritten")
        yield from (self._miswritten(returned) for returned in observation.returned)
        if observation.mutated:
            yield failed(Check.MUTATED_INPUT, f"the call changed {', '.join(observation.mutated)}")
        if observation.disturbed:
            yield failed(Check.PROCESS_STATE, f"the call changed the process: {'; '.join(observation.disturbed)}")

    def _form(self, returned: Returned) -> Verdict | None:
        """Number of tensors, shapes, dtypes and device of what a call returned."""
        expected = self._expected_form(returned)
        values, name = parts_of(returned.value), returned.call.name
        if len(expected) == 1 and issubclass(type(returned.value), tuple | list):
            what = f"a {type_name(returned.value)} of {len(values)}"
            return failed(Check.SHAPE, f"{name}: expected the {expected[0][0]} itself, got {what}")
        if len(values) != len(expected) or not all(map(is_tensor, values)):
            got = ", ".join(map(kind_of, values))
            return failed(Check.SHAPE, f"{name}: expected {len(expected)} tensor(s), got ({got})")
        for (what, shape, dtype), value in zip(expected, values, strict=True):
            if instead := why_not_plain(value):
                return failed(Check.SHAPE, f"{name}: expected a strided torch.Tensor as {what}, got {instead}")
            if value.shape != shape:
                wrong = failed(Check.SHAPE, f"{name}: expected {what} of shape {list(shape)}, got {list(value.shape)}")
                return replace(wrong, finding=explain_form(value.shape, shape, what))
            if value.dtype != dtype:
                return failed(Check.DTYPE, f"{name}: expected {what} of {dtype}, got {value.dtype}")
            if value.device != self.problem.device:
                return failed(Check.DEVICE, f"{name}: expected {what} on {self.problem.device}, got {value.device}")
        return None

    def _miswritten(self, returned: Returned) -> Verdict | None:
        return failed(self.writes, f"{returned.call.name}: {returned.miswritten}") if returned.miswritten else None

    def _use(self, used: BudgetUse) -> None:
        self.used = self.used.worst_with(used)


def _raised(returned: Returned) -> Verdict | None:
    if not returned.error:
        return None
    if returned.out_of_memory:
        return Verdict(Status.UNAVAILABLE, f"{returned.call.name}: out of memory: {returned.error}")
    verdict = failed(Check.CALL, f"{returned.call.name}: the call raised {returned.error}")
    return replace(verdict, detail=returned.traceback)


def share_of(error: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Error over allowance; no error over no allowance, as in a row without keys, is 0."""
    return (error / allowed).nan_to_num(nan=0.0, posinf=torch.inf)


def worst_of(share: torch.Tensor) -> float:
    return float(share.max()) if share.numel() else 0.0
