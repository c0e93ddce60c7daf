"""Inputs that are handed out, and what is remembered of them until results are judged."""

import threading
from dataclasses import dataclass
from typing import Any

import torch

from mla_conformance.api.kernels import kernel_around
from mla_conformance.backends.declaration import Declaration
from mla_conformance.cases.case import Case
from mla_conformance.engine.machine import find_device
from mla_conformance.files.whole import InputError
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.memory import Guarded, Snapshot, poison_allocator
from mla_conformance.roles.table import DEFINITIONS
from mla_conformance.trials.trial import Context
from mla_conformance.vocabulary.capabilities import CONFORMS, find_capability


@dataclass(frozen=True)
class HandedInputs:
    """What was handed out last, with its bytes; the context makes it again as it was, and what is expected."""

    problem: Problem
    context: Context
    out: Guarded | None
    before: Snapshot


_LAST = threading.local()  # what each thread was handed; nothing earlier, since it may hold most of a GPU's memory


def find_torch_device(wanted: str | torch.device) -> torch.device:
    """The device of this name, an InputError if it is not there; by default CUDA where there is a GPU."""
    kind, _, number = str(wanted).partition(":")
    if kind not in ("", "cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise InputError(f"device: expected cpu, cuda or a GPU such as cuda:1, got {str(wanted)!r}")
    device, count = find_device(kind), torch.cuda.device_count()
    if device is None or int(number or 0) >= max(1, count):
        raise InputError(f"device {wanted!s}: expected cpu, or one of the CUDA devices that torch sees: {count}")
    return torch.device(kind, int(number)) if number else device


def hand_out(case: Case, device: str | torch.device) -> dict[str, Any]:
    """The named inputs of a case's only call, in memory of their own; an InputError of one that takes several."""
    where, context = find_torch_device(device), Context()
    procedure = find_capability(case.capability).procedure
    problem = context.problem(case, where) if procedure == CONFORMS else None
    if problem is None or len(problem.calls) > 1:
        raise InputError(f"{case.id}: decided by several calls; expected mla.judge(case, function), which makes them")
    call = problem.calls[0]
    out = call.output_buffer()
    inputs: dict[str, Any] = {}
    kernel = kernel_around(lambda **named: inputs.update(named), case.role, Declaration())
    instance = DEFINITIONS[case.role].kernel(kernel, case, problem.dtype, where)
    call.prepare(instance)
    call.invoke(instance, out)
    # Every tensor that must not be written, and once: what is owned, and what was joined from it.
    watched = problem.caller_owned
    known = {x.untyped_storage().data_ptr() for x in watched.values()}
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and name != "out"}
    watched |= {name: x for name, x in tensors.items() if x.untyped_storage().data_ptr() not in known}
    _LAST.handed = HandedInputs(problem, context, out, Snapshot(watched))
    poison_allocator(call.result_shape, problem.output_dtype, where, case.poison)
    return inputs


def handed_last(case: Case) -> HandedInputs:
    """What :func:`hand_out` remembers; an InputError if in this thread that is nothing, or another case's."""
    last: HandedInputs | None = getattr(_LAST, "handed", None)
    if last is None or last.problem.case != case:
        got = "nothing was handed out" if last is None else f"those of {last.problem.case.id} were handed out last"
        raise InputError(f"assert_conforms: expected results of the inputs of {case.id}, but {got}; call x = "
                         "case.inputs(device) in the same test, and judge before the next case")  # fmt: skip
    return last
