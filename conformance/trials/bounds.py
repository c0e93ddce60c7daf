"""Operands that end where memory ends, and that begin where it begins: nothing beside them may be touched.

A GPU's context is lost with a fault; a process of its own then names the operand: ``python -m`` this module.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import Observation, OutOfBoundsError, call_fenced
from mla_conformance.judging.verdict import Check
from mla_conformance.problems.fences import OUT, Fence, Side, operands
from mla_conformance.trials.context import Context
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Trial

_SECONDS = 300
_BESIDE = {Side.END: "behind the end of", Side.BEGINNING: "before the beginning of"}


def memory_bounds(trial: Trial) -> None:
    """The ends of all operands at once, then their beginnings."""
    expectation = trial.expect(trial.problem)
    for side in Side:
        seen = trial.run(trial.backend, trial.problem, perform=partial(call_fenced, Fence(side)))
        _require_inside(trial, side, seen)
        trial.judged(trial.problem, expectation, seen, f"with no memory {_BESIDE[side]} every operand")


def _require_inside(trial: Trial, side: Side, seen: Observation) -> None:
    """Fail where something else than the operands was touched."""
    if seen.error is None:
        return
    kind, _, what = seen.error.error.partition(": ")
    if kind == OutOfBoundsError.__name__:
        trial.fail(Check.OUT_OF_BOUNDS, f"{seen.error.call.name}: {what}")
    if seen.device_lost:
        found = _named_apart(trial, side)
        what = f"touches what lies {_BESIDE[side]} {found}" if found else seen.error.error
        trial.fail(Check.OUT_OF_BOUNDS, f"{seen.error.call.name}: {what}")


def _named_apart(trial: Trial, side: Side) -> str:
    """The operand that is at fault when it is fenced alone, as a process says that dies of it; empty if none does."""
    told = (trial.subject.backend.reference, str(trial.subject.device), trial.case.id, trial.context.salt, side)
    command = [sys.executable, "-m", __name__, *told]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.splitlines()[-1] if done.returncode and done.stdout else ""


def main(told: Sequence[str]) -> None:
    """Fence one operand after the other, each named before it is tried."""
    reference, device, case, salt, side = told
    trial = Trial(Subject.of(reference, torch.device(device)), Case.parse(case), Context(salt))
    for name in dict.fromkeys(name for call in trial.problem.calls for name in (*operands(call), OUT)):
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if trial.run(trial.backend, trial.problem, perform=partial(call_fenced, Fence(Side(side), name))).error:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
