"""The driver: runs a problem's calls on a backend and observes everything that comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from mla_conformance.backends.foreign import type_name
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.driving.executor import IN_PROCESS, Executor, Handed, StepResult, itself, look_afterwards, run_step
from mla_conformance.problems.calls import KernelCall
from mla_conformance.problems.cpu_room import noted_faults
from mla_conformance.problems.fences import Buffers, Fence, MovedCall
from mla_conformance.problems.memory import Guarded, Snapshot, device_lost, poison, poison_allocator
from mla_conformance.problems.problem import Problem
from mla_conformance.reference.attention import merge


@dataclass(frozen=True)
class Instead:
    """Stands for an object that a call returned in another process, where it has stayed: no tensor to be looked at."""

    kind: str
    why: str
    is_tensor: bool


def kind_of(value: Any) -> str:
    return value.kind if type(value) is Instead else type_name(value)


def is_tensor(value: Any) -> bool:
    return value.is_tensor if type(value) is Instead else issubclass(type(value), torch.Tensor)


def why_not_plain(value: Any) -> str:
    """What an object is instead of a strided, materialised ``torch.Tensor``; empty if it is one, on any device."""
    if type(value) is Instead:
        return value.why
    if type(value) is not torch.Tensor:
        return f"a {type_name(value)}"
    try:
        if value.layout is not torch.strided:
            return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
        kinds = {
            "nested": value.is_nested,
            "quantized": value.is_quantized,
            "lazily conjugated": value.is_conj(),
            "lazily negated": value.is_neg(),
            "symbolic zero": value._is_zerotensor(),
            "functional": torch._is_functional_tensor(value),
        }
        if kind := next((kind for kind, holds in kinds.items() if holds), ""):
            return f"a {kind} tensor"
        if value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            needed = (value.storage_offset() + last + 1) * value.element_size()
            held = value.untyped_storage().nbytes()
            if held < needed:
                return f"a tensor whose storage holds {held} bytes of {needed}"
    except RuntimeError:
        return "a tensor whose storage cannot be reached"
    return ""


def parts_of(value: Any) -> tuple[Any, ...]:
    """The objects that a call returned: those of a tuple or a list, or the only one.

    Plain tensors without anything that was hung on them, such as a gradient or a method of their own.
    """
    kind = next((kind for kind in (tuple, list) if issubclass(type(value), kind)), None)
    parts = (value,) if kind is None else tuple(kind.__iter__(value))
    # The method of the class: the tensor's own may be anything.
    return tuple(torch.Tensor.detach(part) if type(part) is torch.Tensor else part for part in parts)


OutputAndLse = tuple[torch.Tensor, torch.Tensor]  # output [T, N, V] and LSE [N, T]


@dataclass(frozen=True)
class Returned:
    call: KernelCall
    value: Any  # the returned object as it was after the call; None if the call raised
    error: str = ""  # one line for an exception, and the traceback behind it
    traceback: str = ""
    out: Guarded | None = None  # the output tensor that was handed in
    out_of_memory: bool = False
    miswritten: str = ""  # what the call should have written otherwise, beside its result
    disturbed: tuple[str, ...] = ()  # settings of the process that the call changed; they are restored
    kept: Any = None  # the returned object for :func:`as_it_is_now`


@dataclass(frozen=True)
class Observation:
    returned: tuple[Returned, ...]  # one entry per call; the last one may carry an error
    # (output, lse) of all calls merged in float64, where there are several and all returned two tensors
    merged: OutputAndLse | None
    mutated: tuple[str, ...]  # caller-owned tensors whose bytes changed
    merge_error: str = ""  # what the backend's own merge raised
    device_lost: bool = False  # the calls left the GPU's context unusable, so nothing of them can be looked at
    disturbed: tuple[str, ...] = ()

    @property
    def error(self) -> Returned | None:
        return next((returned for returned in self.returned if returned.error), None)


def run_calls(
    backend: KernelBackend,
    problem: Problem,
    prepare: bool = True,
    executor: Executor = IN_PROCESS,
    perform: Callable[..., Any] | None = None,
) -> Observation:
    """Prepare the metadata, unless that was done before, and run the calls of ``problem`` up to one that raises.

    The executor carries the calls out; ``perform`` makes one, where that is not :func:`call_once`.

    Raises:
        MemoryError: none was left to merge what the calls returned, whoever merges.
    """
    before, device = Snapshot(problem.caller_owned), problem.device
    returned: list[Returned] = []
    for call in problem.calls:
        out = call.output_buffer()
        first = partial(poison_allocator, call.result_shape, problem.output_dtype, device, problem.case.poison)
        reached = [*call.reached, *([] if out is None else [out.storage])]
        done = executor.call(partial(perform or call_once, first, backend, call, out, prepare, device), reached)
        wrong = "" if done.error else call.wrong_writes()
        told = (done.value, done.error, done.traceback, out, done.out_of_memory, wrong, done.disturbed, done.kept)
        returned.append(Returned(call, *told))
        if done.error:
            break
    disturbed = tuple(change for part in returned for change in part.disturbed)
    if returned and returned[-1].error and executor.lost(device):
        return Observation(tuple(returned), None, (), device_lost=True, disturbed=disturbed)
    merging = StepResult()
    if states := states_of(problem, returned):
        if problem.case.own_merge:
            merging = executor.call(partial(merged_by_its_own, backend, problem.case.merges_in_place, states))
        else:
            merging = run_step(partial(reduce, lambda prefix, suffix: merge(*prefix, *suffix), states))
    if merging.out_of_memory:
        raise MemoryError(f"merging partial states: {merging.error}")
    disturbed = tuple(dict.fromkeys([*disturbed, *merging.disturbed]))
    return Observation(tuple(returned), merging.value, tuple(before.changed()), merging.error, disturbed=disturbed)


def as_it_is_now(observation: Observation, executor: Executor) -> Observation:
    """The observation with what its calls returned as later ones have left it."""
    again = [executor.call(partial(itself, returned.kept)).value for returned in observation.returned]
    returned = (replace(one, value=value) for one, value in zip(observation.returned, again, strict=True))
    return replace(observation, returned=tuple(returned))


def call_once(
    first: Callable[[], None], backend: Any, call: KernelCall, out: Guarded | None, prepare: bool, device: torch.device
) -> Any:
    """Do what is to be done ``first``, make a call with its output tensor, if it takes one, and wait for it."""
    first()
    look_afterwards(Handed.of(call, None if out is None else out.view).settle)
    if prepare:
        call.prepare(backend)
    value = call.invoke(backend, out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return value


class OutOfBoundsError(Exception):
    """A call that touched what lies beside an operand."""


def call_fenced(
    fence: Fence,
    first: Callable[[], None],
    backend: Any,
    call: KernelCall,
    out: Guarded | None,
    prepare: bool,
    device: torch.device,
) -> Any:
    """As :func:`call_once`, over operands in fenced memory; a fault on a GPU loses the context, which is seen.

    Raises:
        OutOfBoundsError: something beside an operand was touched; its message says which and how.
    """
    fenced = MovedCall(fence, call, out)
    try:
        with noted_faults():
            value = call_once(first, backend, fenced.call, fenced.out, prepare, device)
    finally:
        # What touched something may have raised because of what it found there.
        if beyond := [] if device_lost(device) else list(fenced.settle()):
            raise OutOfBoundsError("; ".join(beyond))
    return fenced.handed_back(value, out)


def call_in_buffers(
    buffers: Buffers,
    first: Callable[[], None],
    backend: Any,
    call: KernelCall,
    out: Guarded | None,
    prepare: bool,
    device: torch.device,
) -> Any:
    """As :func:`call_once`, over operands at the addresses of those of earlier calls."""
    moved = MovedCall(buffers, call, out)
    try:
        value = call_once(first, backend, moved.call, moved.out, prepare, device)
    finally:
        if not device_lost(device):
            moved.write_back()
    return moved.handed_back(value, out)


def states_of(problem: Problem, returned: Sequence[Returned]) -> list[OutputAndLse]:
    """What is to be merged, in that order, of the counted rows; empty where nothing is, or not each call gave a state.

    Context chunks or ranks are in order, of a prefill the new tokens are the last, as a layer merges them.
    """
    if not problem.case.is_merged or len(returned) != len(problem.calls):
        return []
    states = [parts_of(part.value) for part in returned]
    for parts, part in zip(states, returned, strict=True):
        tokens, heads, _ = shape = part.call.result_shape
        if any(map(why_not_plain, parts)) or any(each.device != problem.device for each in parts):
            return []
        if [each.shape for each in parts] != [shape, (heads, tokens)]:
            return []
    rows = problem.query_start_loc[-1]
    new, *chunks = [(output[:rows], lse[:, :rows]) for output, lse in states]
    return [*chunks, new]


def merged_by_its_own(backend: Any, in_place: bool, states: list[OutputAndLse]) -> OutputAndLse:
    """By the backend's merges, each into fresh, poisoned outputs, or ``in_place``, into one running state."""
    output, lse = [part.clone() for part in states[0]] if in_place else states[0]
    for suffix, suffix_lse in states[1:]:
        prefix, prefix_lse = output, lse
        if not in_place:
            output = poison(suffix.shape, suffix.dtype, suffix.device)
            lse = poison(suffix_lse.shape, suffix_lse.dtype, suffix_lse.device)
        backend.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse=lse)
    return output, lse
