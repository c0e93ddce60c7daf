"""The driver: runs a problem's calls on a backend and observes everything that comes back."""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.driving.attempt import attempt
from mla_conformance.driving.plain import parts_of, why_not_plain
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.memory import Guarded, Snapshot, device_lost, poison, poison_allocator
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.merge import merge

State = tuple[torch.Tensor, torch.Tensor]
"""Output [T, N, V] and LSE [N, T]."""


@dataclass(frozen=True)
class Returned:
    """What one call gave back.

    Attributes:
        call: the call that was made.
        value: the returned object as it is; None if the call raised.
        error: one line for an exception, and the traceback behind it.
        out: the output tensor that was handed in.
        out_of_memory: the exception says that memory ran out.
        miswritten: what the call should have written otherwise, beside its result.
        disturbed: settings of the process that the call changed; they are restored.
    """

    call: KernelCall
    value: Any
    error: str = ""
    traceback: str = ""
    out: Guarded | None = None
    out_of_memory: bool = False
    miswritten: str = ""
    disturbed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """Everything that running a problem showed.

    Attributes:
        returned: one entry per call; the last one may carry an error.
        merged: (output, lse) of all calls merged in float64, where there are several and all returned two tensors.
        mutated: caller-owned tensors whose bytes changed.
        merge_error: what the backend's own merge raised.
        device_lost: the calls left the GPU's context unusable, so nothing of them can be looked at.
        disturbed: settings of the process that the calls changed; they are restored.
    """

    returned: tuple[Returned, ...]
    merged: State | None
    mutated: tuple[str, ...]
    merge_error: str = ""
    device_lost: bool = False
    disturbed: tuple[str, ...] = ()

    @property
    def error(self) -> Returned | None:
        """The call that raised."""
        return next((returned for returned in self.returned if returned.error), None)


def run_calls(backend: KernelBackend, problem: Problem, prepare: bool = True) -> Observation:
    """Prepare the metadata, unless that was done before, and run every call of ``problem`` on an instance."""
    before = Snapshot(problem.caller_owned)
    returned = _make_calls(backend, problem, prepare)
    disturbed = tuple(change for part in returned for change in part.disturbed)
    if returned and returned[-1].error and device_lost(problem.device):
        return Observation(tuple(returned), None, (), device_lost=True, disturbed=disturbed)
    merging = attempt(partial(_merge, backend, problem, returned))
    disturbed = tuple(dict.fromkeys([*disturbed, *merging.disturbed]))
    return Observation(tuple(returned), merging.value, tuple(before.changed()), merging.error, disturbed=disturbed)


def _make_calls(backend: KernelBackend, problem: Problem, prepare: bool) -> list[Returned]:
    """Every call up to the first that raises."""
    returned: list[Returned] = []
    for call in problem.calls:
        returned.append(_guarded_call(backend, problem, call, prepare))
        if returned[-1].error:
            break
    return returned


def _guarded_call(backend: KernelBackend, problem: Problem, call: KernelCall, prepare: bool) -> Returned:
    out = call.output_buffer()
    poison_allocator(call.result_shape, problem.output_dtype, problem.device, problem.case.poison)

    def step() -> Any:
        if prepare:
            call.prepare(backend)
        value = call.invoke(backend, out)
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        return value

    done = attempt(step)
    miswritten = "" if done.error else call.wrong_writes()
    return Returned(
        call, done.value, done.error, done.traceback, out, done.out_of_memory, miswritten, disturbed=done.disturbed
    )


def _merge(backend: KernelBackend, problem: Problem, returned: list[Returned]) -> State | None:
    """Context chunks or ranks in order, of a prefill the new tokens last, as a layer does it."""
    if not problem.case.is_merged or len(returned) != len(problem.calls):
        return None
    states = [parts_of(part.value) for part in returned]
    if not all(_is_state(state, part, problem) for state, part in zip(states, returned, strict=True)):
        return None
    rows = problem.query_start_loc[-1]
    new, *chunks = [(output[:rows], lse[:, :rows]) for output, lse in states]
    if problem.case.merges_in_place:
        return _merged_in_place(backend, [*chunks, new])
    combine = partial(_own_merge, backend) if problem.case.own_merge else merge
    return reduce(lambda prefix, suffix: combine(*prefix, *suffix), [*chunks, new])


def _own_merge(
    backend: Any, prefix: torch.Tensor, prefix_lse: torch.Tensor, suffix: torch.Tensor, suffix_lse: torch.Tensor
) -> State:
    """The backend's merge into fresh, poisoned outputs."""
    output = poison(suffix.shape, suffix.dtype, suffix.device)
    lse = poison(suffix_lse.shape, suffix_lse.dtype, suffix_lse.device)
    backend.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse=lse)
    return output, lse


def _merged_in_place(backend: Any, states: list[State]) -> State:
    """By the backend's merge into one running state, which is prefix and output at once."""
    output, lse = (part.clone() for part in states[0])
    for suffix, suffix_lse in states[1:]:
        backend.merge_attn_states(output, output, lse, suffix, suffix_lse, output_lse=lse)
    return output, lse


def _is_state(parts: tuple[Any, ...], returned: Returned, problem: Problem) -> bool:
    """Whether a call returned two tensors of the right shapes on the right device, so that they can be merged."""
    tokens, heads, _ = shape = returned.call.result_shape
    if any(map(why_not_plain, parts)) or any(part.device != problem.device for part in parts):
        return False
    return [part.shape for part in parts] == [shape, (heads, tokens)]
