"""Operands that end where memory ends, and that begin where it begins: nothing beside them may be touched."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.driving.driver import call_once
from mla_conformance.judging.verdict import Check
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.fences import OUT, Buffers, Fence, MovedCall, Side, noted_faults, operands
from mla_conformance.problems.memory import Guarded, device_lost
from mla_conformance.trials.subject import Subject
from mla_conformance.trials.trial import Context, Trial

_SECONDS = 300
_BESIDE = {Side.END: "behind the end of", Side.BEGINNING: "before the beginning of"}


class OutOfBoundsError(Exception):
    """A call that touched what lies beside an operand."""


def call_moved(
    place: Fence | Buffers,
    first: Callable[[], None],
    backend: Any,
    call: KernelCall,
    out: Guarded | None,
    prepare: bool,
    device: torch.device,
) -> Any:
    """As :func:`call_once`, over operands that lie elsewhere; a fault on a GPU loses the context, which is seen."""
    moved, fenced = MovedCall(place, call, out), isinstance(place, Fence)
    try:
        with noted_faults() if fenced else nullcontext():
            value = call_once(first, backend, moved.call, moved.out, prepare, device)
    finally:
        if not device_lost(device):
            moved.write_back()
            # What touched something may have raised because of what it found there.
            if fenced and (beyond := list(moved.settle())):
                raise OutOfBoundsError("; ".join(beyond))
    return moved.handed_back(value, out)


def memory_bounds(trial: Trial) -> None:
    """The ends of all operands at once, then their beginnings."""
    expectation = trial.context.expect(trial.problem)
    for side in Side:
        seen = trial.run(trial.backend, trial.problem, perform=partial(call_moved, Fence(side)))
        if error := seen.error:
            kind, _, what = error.error.partition(": ")
            if kind == OutOfBoundsError.__name__:
                trial.fail(Check.OUT_OF_BOUNDS, f"{error.call.name}: {what}")
            if seen.device_lost:
                found = _named_apart(trial, side)
                what = f"touches what lies {_BESIDE[side]} {found}" if found else error.error
                trial.fail(Check.OUT_OF_BOUNDS, f"{error.call.name}: {what}")
        trial.judged(trial.problem, expectation, seen, f"with no memory {_BESIDE[side]} every operand")


def _named_apart(trial: Trial, side: Side) -> str:
    """The operand that is at fault when it is fenced alone, of which a process of its own dies; empty if none is."""
    told = (trial.subject.backend.reference, str(trial.subject.device), trial.case.id, trial.context.salt, side)
    command = [sys.executable, "-m", __name__, *told]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.splitlines()[-1] if done.returncode and done.stdout else ""


def main(told: Sequence[str]) -> None:
    reference, device, case, salt, side = told
    trial = Trial(Subject.of(reference, torch.device(device)), Case.parse(case), Context(salt))
    for name in dict.fromkeys(name for call in trial.problem.calls for name in (*operands(call), OUT)):
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if trial.run(trial.backend, trial.problem, perform=partial(call_moved, Fence(Side(side), name))).error:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
