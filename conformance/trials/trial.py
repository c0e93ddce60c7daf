"""A trial: one subject on one case, as the procedures see it, and calls without the driver's synchronisation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch

from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.foreign import AnswerError
from mla_conformance.backends.foreign import cut as shortened
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, Returned, as_it_is_now, parts_of, run_calls, why_not_plain
from mla_conformance.driving.executor import StepResult
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.verdict import BudgetUse, Check, Nonconformance, Status, Verdict, failed
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem
from mla_conformance.roles.table import judge
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject
from mla_conformance.vocabulary.capabilities import find_capability


@dataclass(frozen=True)
class Observed:
    problem: Problem
    expectation: Golden
    observation: Observation


@dataclass
class Trial:
    """Runs a subject and collects the verdict of everything that is judged on the way."""

    subject: Subject
    case: Case
    context: Context  # what the process has made before
    # the verdict so far; a pass carries the budget used by all judged steps
    verdict: Verdict = field(default_factory=lambda: Verdict(Status.HARNESS_ERROR, "nothing was judged"))
    last: Observed | None = None  # what was judged last
    disturbed: bool = False  # whether the backend left the process other than it found it

    @cached_property
    def problem(self) -> Problem:
        return self.build()

    def build(self, case: Case | None = None) -> Problem:
        """The inputs of a case, by default the trial's own, on the subject's device."""
        return self.context.problem(case or self.case, self.subject.device)

    def expect(self, problem: Problem) -> Golden:
        """The golden result; asked for before a call: one that changes its inputs must not change what is expected."""
        return self.context.expect(problem)

    @cached_property
    def declaration(self) -> Declaration:
        """What the adapter declares that the case is for."""
        question = partial(self.subject.declaration_of, self.case.role)
        declared: Declaration = self.query("asked what it declares, it", question, Declaration)
        return declared

    @cached_property
    def backend(self) -> Any:
        """The instance that all calls of the trial go to: a kernel, or a layer."""
        return self.create()

    def create(self, case: Case | None = None) -> Any:
        return self.make("the constructor", partial(self.subject.create, case or self.case))

    def call(self, what: str, call: Callable[[], Any], reached: Iterable[torch.Tensor] = ()) -> Any:
        """What a call returned; what it raises, or leaves changed in the process, is the backend's failure."""
        return self._value(what, self.subject.executor.call(call, reached))

    def make(self, what: str, step: Callable[[], Any]) -> Any:
        """What is for later steps; otherwise as :meth:`call`."""
        return self._value(what, self.subject.executor.make(step))

    def query(self, what: str, question: Callable[[], Any], kind: Any) -> Any:
        """Plain data of this type; otherwise as :meth:`call`."""
        return self._value(what, self.subject.executor.query(question, kind))

    def _value(self, what: str, done: StepResult) -> Any:
        self.disturbed = self.disturbed or bool(done.disturbed)
        if done.out_of_memory:
            self.settle(Verdict(Status.UNAVAILABLE, f"out of memory: {done.error}"))
        if done.error:
            self.fail(Check.CALL, f"{what} raised {done.error}")
        if done.disturbed:
            self.fail(Check.PROCESS_STATE, f"{what} changed the process: {'; '.join(done.disturbed)}")
        return done.value

    def evidence(self) -> dict[str, str]:
        """What the instance says of the kernel that served it; empty if none was made or it does not tell."""
        if "backend" not in self.__dict__:
            return {}
        done = self.subject.executor.query(partial(_evidence, self.backend), dict[str, str])
        return {"kernel_evidence": f"raised {done.error}"} if done.error else done.value

    def require_support(self) -> None:
        """Unsupported if the backend has no class, here, that the case could call, or does not declare what it needs.

        Where refusals are what is judged, the procedure asks for the second.
        """
        if find_capability(self.case.capability).probes_refusals:
            reasons = self.query("asked what it is, it", partial(self.subject.missing_role, self.case), list[str])
        else:
            reasons = self.unsupported()
        if reasons:
            self.settle(Verdict(Status.UNSUPPORTED, "; ".join(reasons)))

    def unsupported(self, case: Case | None = None) -> list[str]:
        """What of a case, by default the trial's own, the backend declares unsupported; that it raises is a failure."""
        question = partial(_unsupported, self.subject, case or self.case)
        answer: list[str] | str = self.query("asked what it supports, it", question, list[str] | str)
        if isinstance(answer, str):
            self.fail(Check.CALL, f"asked what it supports, {answer}")
        return answer

    def conforms(self, problem: Problem | None = None, step: str = "", prepare: bool = True) -> Observation:
        """Run a problem, by default the case's own, and judge everything that comes back.

        Args:
            step: where in a sequence of calls this is, for the message.
            prepare: as for :meth:`run`.
        """
        problem = problem or self.problem
        expectation = self.expect(problem)
        return self.judged(problem, expectation, self.run(self.backend, problem, prepare), step)

    def run(
        self, instance: Any, problem: Problem, prepare: bool = True, perform: Callable[..., Any] | None = None
    ) -> Observation:
        """Make the problem's calls on an instance, each by ``perform``, as for :func:`run_calls`.

        Args:
            prepare: whether its metadata are handed over first; those of ranks are before each call in any case, since
                the ranks share the instance.
        """
        ranks = isinstance(problem.case, CachedCase) and len(problem.calls) > 1
        observation = run_calls(instance, problem, prepare or ranks, self.subject.executor, perform)
        self.disturbed = self.disturbed or bool(observation.disturbed)
        return observation

    def interleaved(self, other: Problem, difference: str = "") -> None:
        """Two instances: prepare both, then run both; the second one is made for the other problem's case.

        Args:
            difference: how that instance differs from the first, for the message.
        """
        both = [
            (instance, problem, self.expect(problem))
            for instance, problem in ((self.backend, self.problem), (self.create(other.case), other))
        ]
        # In one step, so that metadata that they share are one object wherever it is carried out.
        pairs = [(instance, problem.calls[0]) for instance, problem, _ in both]
        self.make("prepare_metadata", partial(_prepare_each, pairs))
        for instance, problem, expectation in both:
            observation = self.run(instance, problem, prepare=False)
            step = " ".join(filter(None, ("after another instance", difference, "was prepared")))
            self.judged(problem, expectation, observation, step)

    def judged(self, problem: Problem, expectation: Golden, observation: Observation, step: str = "") -> Observation:
        """Judge what a problem's calls returned; ``step`` as for :meth:`conforms`."""
        self.last = Observed(problem, expectation, observation)
        verdict = judge(problem, expectation, observation, self.declaration)
        if step and verdict.status is not Status.PASS:
            verdict = replace(verdict, message=f"{step}: {verdict.message}")
        self.settle(verdict)
        return observation

    def other_problem(self) -> Problem:
        """The same configuration with other lengths and values, for tests of state."""
        return self.build(self.case.varied())

    def redrawn_problem(self) -> Problem:
        return self.build(replace(self.case, seed=self.case.seed + 2))

    def require(self, holds: bool, check: Check, message: str) -> None:
        if not holds:
            self.fail(check, message)

    def fail(self, check: Check, message: str) -> NoReturn:
        self.settle(failed(check, message))
        raise AssertionError("a failure settles a trial")

    def unchanged(self, earlier: Observation, copies: list[bytes]) -> None:
        """What an earlier call returned must not have been overwritten by later ones."""
        same = returned_bytes(as_it_is_now(earlier, self.subject.executor)) == copies
        self.require(same, Check.STALE_RESULT, "a later call overwrote the result of an earlier one")

    def settle(self, verdict: Verdict) -> None:
        """Keep a pass together with what earlier steps used; raise anything else."""
        earlier = self.verdict.used if self.verdict.status is Status.PASS else BudgetUse()
        worst = {rule: max(share, getattr(earlier, rule)) for rule, share in vars(verdict.used).items()}
        self.verdict = replace(verdict, used=BudgetUse(**worst))
        if verdict.status is not Status.PASS:
            raise Nonconformance(self.verdict)


def _unsupported(subject: Subject, case: Case) -> list[str] | str:
    """The reasons, or what is wrong with the answer."""
    try:
        return subject.unsupported(case)
    except AnswerError as error:
        return str(error)


def _evidence(instance: Any) -> dict[str, str]:
    tell = getattr(instance, "kernel_evidence", dict)
    return {shortened(str(name)): shortened(str(value)) for name, value in tell().items()}


def returned_bytes(observation: Observation) -> list[bytes]:
    """The bytes of everything returned, as a value that later calls cannot change; of no tensor, what it is instead."""
    found = []
    for part in (part for returned in observation.returned for part in parts_of(returned.value)):
        if instead := why_not_plain(part):
            found.append(instead.encode())
        else:
            own = part.clone(memory_format=torch.contiguous_format)
            found.append(bytes(storage_bytes(own).cpu().numpy().tobytes()))
    return found


def results(observation: Observation) -> list[torch.Tensor]:
    """Output, and LSE if there is one, of the only call of an observation."""
    return list(parts_of(observation.returned[0].value))


def prepare(backend: Any, problem: Problem) -> None:
    problem.calls[0].prepare(backend)


def _prepare_each(pairs: Iterable[tuple[Any, KernelCall]]) -> None:
    for instance, call in pairs:
        call.prepare(instance)


def invoke(backend: Any, problem: Problem) -> Any:
    """Make the problem's only call; what the backend returns, possibly still being computed."""
    return problem.calls[0].invoke(backend, None)


def prepared_call(backend: Any, problem: Problem) -> Any:
    prepare(backend, problem)
    return invoke(backend, problem)


def tensors(value: Any) -> list[torch.Tensor]:
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
    return Observation((Returned(problem.calls[0], value),), None, ())
