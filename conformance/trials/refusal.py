"""What a backend declares unsupported must be refused before anything is launched; what it declares must run."""

from functools import partial
from typing import NoReturn

from mla_conformance.driving.driver import Observation
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.roles.table import judge
from mla_conformance.trials.trial import Trial


def refuses_or_conforms(trial: Trial) -> None:
    """As the backend's own declaration says."""
    reasons = trial.unsupported()
    if reasons:
        must_refuse(trial, "; ".join(reasons))
    else:
        trial.conforms()


def must_refuse(trial: Trial, declared: str) -> None:
    """The backend rejects this configuration, so a call must raise before it launches anything."""
    problem = trial.problem  # built outside: an input that cannot be built is no refusal
    expectation = trial.expect(problem)
    made = trial.subject.executor.make(partial(trial.subject.create, trial.case))
    _require_undisturbed(trial, made.disturbed, declared)
    if made.error:
        trial.settle(Verdict(Status.PASS, f"refused: {made.error}"))
        return
    observation = trial.run(made.value, problem)
    _require_harmless(trial, observation, declared)
    if observation.error and not observation.error.out_of_memory:
        trial.settle(Verdict(Status.PASS, f"refused: {observation.error.error}"))
        return
    verdict = judge(problem, expectation, observation, trial.declaration)
    if verdict.status is Status.UNAVAILABLE:
        trial.settle(verdict)
    right = verdict.status is Status.PASS
    check = Check.UNDECLARED_SUPPORT if right else Check.UNSAFE_REFUSAL
    result = "a right result" if right else "a wrong result"
    trial.fail(check, f"declared unsupported ({declared}), but it ran and returned {result}")


def _require_harmless(trial: Trial, observation: Observation, declared: str) -> None:
    """Whether it was refused or not: nothing is lost, written or left changed."""
    if observation.device_lost and observation.error:
        _unsafe(trial, declared, f"launched: {observation.error.error}")
    if observation.mutated:
        _unsafe(trial, declared, f"changed {', '.join(observation.mutated)}")
    refused = observation.error
    written = refused.out.written() + refused.out.overrun() if refused and refused.out else 0
    if refused and not refused.out_of_memory and written:
        _unsafe(trial, declared, f"wrote {written} bytes of or around out= before it raised")
    _require_undisturbed(trial, observation.disturbed, declared)


def _require_undisturbed(trial: Trial, disturbed: tuple[str, ...], declared: str) -> None:
    if disturbed:
        trial.disturbed = True
        what = f"declared unsupported ({declared}), but changed the process: {'; '.join(disturbed)}"
        trial.fail(Check.PROCESS_STATE, what)


def _unsafe(trial: Trial, declared: str, what: str) -> NoReturn:
    trial.fail(Check.UNSAFE_REFUSAL, f"declared unsupported ({declared}), but {what}")
