"""A trial: one subject on one case, as the suite's tests see it."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case, Layout
from mla_conformance.driving.driver import Observation, one_line, run_calls
from mla_conformance.driving.phases import phase
from mla_conformance.driving.plain import parts_of, why_not_plain
from mla_conformance.driving.subject import Subject
from mla_conformance.judging.golden import expect
from mla_conformance.judging.judge import judge
from mla_conformance.judging.needs import MOST_OPERATIONS, memory_need, operations_of
from mla_conformance.judging.verdict import BudgetUse, Check, Nonconformance, Status, Verdict, failed
from mla_conformance.problems.memory import storage_bytes, wait_for_memory
from mla_conformance.problems.problem import Problem, build_problem, was_overwritten


@dataclass
class Trial:
    """Runs a subject and collects the verdict of everything that is judged on the way.

    Attributes:
        subject: the backend under test.
        case: the case.
        verdict: the verdict so far; a pass carries the budget used by all judged steps.
        last: what was judged last, and on which problem.
    """

    subject: Subject
    case: Case
    verdict: Verdict = field(default_factory=lambda: Verdict(Status.HARNESS_ERROR, "nothing was judged"))
    last: Observation | None = None
    last_problem: Problem | None = None

    @cached_property
    def problem(self) -> Problem:
        """The inputs of the case."""
        return build_problem(self.case, self.subject.device)

    @property
    def declaration(self) -> Declaration:
        """What the adapter declares that the case is for."""
        return self.subject.declaration_of(self.case.role)

    @cached_property
    def backend(self) -> Any:
        """The instance that all calls of the trial go to: a kernel, or a layer."""
        try:
            return self.subject.create(self.case)
        except Exception as error:
            self._settle(failed(Check.CALL, f"the constructor raised {one_line(error)}"))
            raise

    def evidence(self) -> dict[str, str]:
        """What the instance says of the kernel that served it; empty if none was made or it does not tell."""
        tell = getattr(self.__dict__.get("backend"), "kernel_evidence", dict)
        try:
            return {str(name): str(value) for name, value in tell().items()}
        except Exception as error:
            return {"kernel_evidence": f"raised {one_line(error)}"}

    def unsupported(self) -> list[str]:
        """What of the case the backend declares unsupported; a query that raises is a failure."""
        try:
            return self.subject.unsupported(self.case)
        except Exception as error:
            self._settle(failed(Check.CALL, f"asked what it supports, it raised {one_line(error)}"))
            raise

    def require_role(self) -> None:
        """Settle the trial as unsupported if the backend has no class, here, that the case could call."""
        reasons = self.subject.missing_role(self.case)
        if reasons:
            self._settle(Verdict(Status.UNSUPPORTED, "; ".join(reasons)))

    def require_support(self) -> None:
        """Settle the trial as unsupported if the backend does not declare what the case needs."""
        self.require_role()
        reasons = self.unsupported()
        if reasons:
            self._settle(Verdict(Status.UNSUPPORTED, "; ".join(reasons)))

    def require_memory(self, seconds: float) -> None:
        """Settle the trial as unavailable where the case does not fit; wait for a GPU's memory if others hold it."""
        kind = self.subject.device.type
        work, most = operations_of(self.case), MOST_OPERATIONS.get(kind, inf)
        if work > most:
            what = f"too large for a {kind.upper()}: {work:.1e} useful operations, at most {most:.0e} are judged there"
            self._settle(Verdict(Status.UNAVAILABLE, what))
        if kind != "cuda":
            return
        need = memory_need(self.case, kind)
        free = wait_for_memory(self.subject.device, need, seconds)
        if free < need:
            found = f"may need {need / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free after {seconds:.0f} s"
            self._settle(Verdict(Status.UNAVAILABLE, f"out of memory: {found}"))

    def conforms(self, problem: Problem | None = None, step: str = "") -> Observation:
        """Run a problem, by default the case's own, and judge everything that comes back.

        Args:
            problem: what to run.
            step: where in a sequence of calls this is, for the message.
        """
        problem = problem or self.problem
        expect(problem)  # before the call: a backend that changes its inputs must not change what is expected
        return self.judged(problem, run_calls(self.backend, problem), step)

    def interleaved(self, other: Problem) -> None:
        """Two instances: prepare both, then run both."""
        first, second = self.backend, self.subject.create(self.case)
        for problem in (self.problem, other):
            expect(problem)
        for instance, problem in ((first, self.problem), (second, other)):
            problem.calls[0].prepare(instance, problem)
        for instance, problem in ((first, self.problem), (second, other)):
            self.judged(problem, run_calls(instance, problem, prepare=False), "after another instance was prepared")

    def repeat(self, problem: Problem | None = None) -> Observation:
        """Run a problem again without judging it."""
        return run_calls(self.backend, problem or self.problem)

    def judged(self, problem: Problem, observation: Observation, step: str) -> Observation:
        """Judge what a problem's calls returned; ``step`` as for :meth:`conforms`."""
        self.last, self.last_problem = observation, problem
        expectation = expect(problem)
        with phase("judge"):
            verdict = judge(problem, expectation, observation, self.declaration)
        if step and verdict.status is not Status.PASS:
            verdict = replace(verdict, message=f"{step}: {verdict.message}")
        self._settle(verdict)
        return observation

    def was_misled(self) -> bool:
        """Whether the case's own problem, judged last, was another before the backend was called.

        Asked of a failure only: it builds the problem anew.
        """
        problem = self.last_problem
        if problem is None or problem.key != self.case.id or (self.last is not None and self.last.device_lost):
            return False
        return was_overwritten(problem)

    def must_refuse(self, reasons: list[str]) -> None:
        """The backend rejects this configuration, so a call must raise before it launches anything."""
        problem = self.problem  # built outside: an input that cannot be built is no refusal
        expect(self.problem)
        try:
            observation = run_calls(self.subject.create(self.case), problem)
        except Exception as error:
            self._settle(Verdict(Status.PASS, f"refused: {one_line(error)}"))
            return
        declared = "; ".join(reasons)
        if observation.device_lost and observation.error:
            what = f"declared unsupported ({declared}), but launched: {observation.error.error}"
            self._settle(failed(Check.UNSAFE_REFUSAL, what))
        if observation.mutated:
            changed = ", ".join(observation.mutated)
            self._settle(failed(Check.UNSAFE_REFUSAL, f"declared unsupported ({declared}), but changed {changed}"))
        if observation.error and not observation.error.out_of_memory:
            self._settle(Verdict(Status.PASS, f"refused: {observation.error.error}"))
            return
        verdict = judge(self.problem, expect(self.problem), observation, self.declaration)
        if verdict.status is Status.UNAVAILABLE:
            self._settle(verdict)
        check, result = (
            (Check.UNDECLARED_SUPPORT, "a right result")
            if verdict.status is Status.PASS
            else (Check.UNSAFE_REFUSAL, "a wrong result")
        )
        self._settle(failed(check, f"declared unsupported ({declared}), but it ran and returned {result}"))

    def other_problem(self) -> Problem:
        """The same configuration with other lengths and values, for tests of state.

        A decode keeps its query lengths, since several tokens a request are another configuration, and has another
        scale of its cache.
        """
        q, kv, kscale = self.case.q, tuple(reversed(self.case.kv)), self.case.kscale
        if self.case.role is Role.PREFILL:
            q = tuple(length + 3 for length in reversed(q))
        else:
            kv, kscale = tuple(length + 3 for length in kv), 3 * kscale
        other = replace(self.case, q=q, kv=kv, kscale=kscale, seed=self.case.seed + 1)
        return build_problem(other, self.subject.device)

    def relaid_problem(self) -> Problem:
        """The same values in another memory layout."""
        layout = Layout.PACKED if self.case.layout != Layout.PACKED else Layout.SLICED
        return build_problem(replace(self.case, layout=layout), self.subject.device)

    def redrawn_problem(self) -> Problem:
        """The same shapes with other values."""
        return build_problem(replace(self.case, seed=self.case.seed + 2), self.subject.device)

    def require(self, holds: bool, check: Check, message: str) -> None:
        """Fail the trial with this check unless ``holds``."""
        if not holds:
            self._settle(failed(check, message))

    def unchanged(self, earlier: Observation, copies: list[bytes]) -> None:
        """What an earlier call returned must not have been overwritten by later ones."""
        same = returned_bytes(earlier) == copies
        self.require(same, Check.STALE_RESULT, "a later call overwrote the result of an earlier one")

    def _settle(self, verdict: Verdict) -> None:
        """Keep a pass together with what earlier steps used; raise anything else."""
        earlier = self.verdict.used if self.verdict.status is Status.PASS else BudgetUse()
        self.verdict = replace(verdict, used=verdict.used.worst_with(earlier))
        if verdict.status is not Status.PASS:
            raise Nonconformance(self.verdict)


def returned_bytes(observation: Observation) -> list[bytes]:
    """The bytes of everything returned, as a value that later calls cannot change; of no tensor, what it is instead."""
    parts = [part for returned in observation.returned for part in parts_of(returned.value)]
    return [why_not_plain(part).encode() or _bytes_of(part) for part in parts]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(storage_bytes(tensor.contiguous()).cpu().numpy().tobytes())


def results(observation: Observation) -> list[torch.Tensor]:
    """Output, and LSE if there is one, of the only call of an observation."""
    return list(parts_of(observation.returned[0].value))
