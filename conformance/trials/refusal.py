"""What a backend declares unsupported must be refused before anything is launched; what it declares must run."""

from mla_conformance.driving.attempt import attempt
from mla_conformance.driving.driver import Observation, run_calls
from mla_conformance.judging.judge import judge
from mla_conformance.judging.verdict import Check, Status, Verdict
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
    made = attempt(lambda: trial.subject.create(trial.case))
    trial.disturbed = bool(made.disturbed)
    if made.error:
        trial.settle(Verdict(Status.PASS, f"refused: {made.error}"))
        return
    observation = run_calls(made.value, problem)
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
    if observation.device_lost and observation.error:
        what = f"declared unsupported ({declared}), but launched: {observation.error.error}"
        trial.fail(Check.UNSAFE_REFUSAL, what)
    if observation.mutated:
        changed = ", ".join(observation.mutated)
        trial.fail(Check.UNSAFE_REFUSAL, f"declared unsupported ({declared}), but changed {changed}")
