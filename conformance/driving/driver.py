"""The driver: carries out what is a backend's, runs a problem's calls, and observes everything that comes back.

A step may change neither this process's state nor what it was handed, beside its bytes.
"""

import builtins
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from mla_conformance.backends.foreign import LINE, cut, one_line, type_name, user_interrupts
from mla_conformance.driving.settings import watched
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.memory import Guarded, Snapshot, device_lost, out_of_memory, poison, poison_allocator
from mla_conformance.reference.attention import merge

Step = Callable[[], Any]  # a partial of a function that a module names
Perform = Callable[..., Any]  # what makes a call, as :func:`call_once` does
_BUILTINS = vars(builtins)
_looks: list[Callable[[], Iterable[str]]] = []
"""What tells what else the step that is being run changed, once the process is as it was before."""


@dataclass(frozen=True)
class StepResult:
    value: Any = None  # what it returned; None if it raised
    error: str = ""  # one line for an exception, and the traceback behind it
    traceback: str = ""
    out_of_memory: bool = False  # the exception says that memory ran out
    disturbed: tuple[str, ...] = ()  # settings of the process that it changed; they are restored as far as they can be
    kept: Any = None  # the same where the step was carried out, for later steps


def run_step(step: Step) -> StepResult:
    """Run a step that is a backend's; the user's KeyboardInterrupt is raised, one of the step itself is its failure."""
    process, replaced, looks = os.getpid(), list[str](), len(_looks)
    with user_interrupts() as interrupts, watched() as changes:
        before, now = _BUILTINS.copy(), _BUILTINS
        try:
            try:
                value = step()
            finally:  # with none of Python's own functions, since any may be another
                replaced = [
                    name for name in before if name[0] != "_" and (name not in now or now[name] is not before[name])
                ]
                for name in replaced:
                    now[name] = before[name]
            outcome = StepResult(value)
        except BaseException as error:
            if interrupts:
                raise
            try:
                said = cut(traceback.format_exc(), LINE)
            except BaseException as refusal:
                said = f"(no traceback can be made: {type_name(refusal)})"
            outcome = StepResult(None, one_line(error), said, _ran_out(error))
        if os.getpid() != process:
            os._exit(0)  # the step forked, and its child came back into a run that is not its own
    seen = [change for look in _looks[looks:] for change in look()]
    del _looks[looks:]
    return replace(outcome, disturbed=(*(f"builtins.{name} was replaced" for name in replaced), *changes, *seen))


def _ran_out(error: BaseException) -> bool:
    """Whether an exception, or one of a group, says that memory ran out; its text may refuse to be made."""
    try:
        if isinstance(error, BaseExceptionGroup):
            return any(map(_ran_out, error.exceptions))
        return out_of_memory(error)
    except BaseException:
        return False


class Executor:
    """Carries out steps in this process.

    A step is over calls, problems, plain values and what earlier steps made: nothing in it says in which process it
    takes place.
    """

    def call(self, step: Step, reached: Iterable[torch.Tensor] = (), before: Snapshot | None = None) -> StepResult:
        if before is not None:
            before.keep()
        done = self.query(step)
        return replace(done, kept=done.value)

    def query(self, question: Step, kind: Any = None) -> StepResult:
        """A step that answers with plain data of this type; without one, with what is for later steps only."""
        return run_step(question)

    def lost(self, device: torch.device) -> bool:
        """Whether the steps destroyed the GPU's context that they run in."""
        return device_lost(device)

    @property
    def spent(self) -> bool:
        return False

    def begin(self) -> None:
        """What earlier trials handed over is needed no more."""

    def make_room(self) -> None:
        """Give back memory of the device that is held without need."""


IN_PROCESS = Executor()


def itself(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Instead:
    """Stands for an object that stayed in another process: no tensor to be looked at."""

    kind: str
    why: str
    is_tensor: bool


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
    """The objects that a call returned, also in a tuple or a list; plain tensors without what was hung on them."""
    kind = next((kind for kind in (tuple, list) if issubclass(type(value), kind)), None)
    parts = (value,) if kind is None else tuple(kind.__iter__(value))
    # The method of the class: the tensor's own may be anything.
    return tuple(torch.Tensor.detach(part) if type(part) is torch.Tensor else part for part in parts)


OutputAndLse = tuple[torch.Tensor, torch.Tensor]  # output [T, N, V] and LSE [N, T]


@dataclass(frozen=True, kw_only=True)
class Returned(StepResult):
    """What became of a call; its value is the returned object as it was after the call."""

    call: KernelCall
    out: Guarded | None = None  # the output tensor that was handed in
    miswritten: str = ""  # what the call should have written otherwise, beside its result


@dataclass(frozen=True)
class Observation:
    returned: tuple[Returned, ...]  # one entry per call; the last one may carry an error
    merged: OutputAndLse | None  # of all calls in float64, where there are several and all returned two tensors
    mutated: tuple[str, ...]  # caller-owned tensors whose bytes changed
    merge_error: str = ""  # what the backend's own merge raised
    device_lost: bool = False  # the calls left the GPU's context unusable, so nothing of them can be looked at
    disturbed: tuple[str, ...] = ()

    @property
    def error(self) -> Returned | None:
        return next((returned for returned in self.returned if returned.error), None)


def run_calls(
    backend: Any,
    problem: Problem,
    prepare: bool = True,
    executor: Executor = IN_PROCESS,
    perform: Perform | None = None,
) -> Observation:
    """Prepare the metadata, unless that was done before, and run the calls of ``problem`` up to one that raises.

    A MemoryError says that none was left to merge.
    """
    before, device = Snapshot(problem.caller_owned), problem.device
    returned: list[Returned] = []
    for call in problem.calls:
        out = call.output_buffer()
        first = partial(poison_allocator, call.result_shape, problem.output_dtype, device, problem.case.poison)
        reached = [*call.reached, *([] if out is None else [out.storage])]
        step = partial(perform or call_once, first, backend, call, out, prepare, device)
        done = executor.call(step, reached, before)
        wrong = "" if done.error else call.wrong_writes()
        returned.append(Returned(**vars(done), call=call, out=out, miswritten=wrong))
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


def call_once(
    first: Step, backend: Any, call: KernelCall, out: Guarded | None, prepare: bool, device: torch.device
) -> Any:
    first()
    metadata, named = getattr(call, "metadata", None), call.owned() | ({} if out is None else {"out": out.view})
    tensors = [(name, tensor, _form(tensor), tensor.untyped_storage()) for name, tensor in named.items()]
    _looks.append(partial(_settle_operands, tensors, metadata, dict(_fields("metadata", metadata))))
    if prepare:
        call.prepare(backend)
    value = call.invoke(backend, out)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return value


_KEPT = (bool, int, float, str, tuple, torch.dtype, type(None))


def _settle_operands(
    tensors: list[tuple[str, torch.Tensor, dict[str, Any], torch.UntypedStorage]],
    metadata: Any,
    before: dict[str, Any],
) -> Iterator[str]:
    """What of the operands is otherwise now, beside their bytes, in words; those looked at later get their form back.

    A library may hang further attributes on metadata; what stands in it is the caller's.
    """
    for name, tensor, form, storage in tensors:
        now = _form(tensor)
        if changed := [part for part, old in form.items() if now[part] != old]:
            if storage.nbytes() != form["bytes"]:  # what it has lost by being made smaller stays lost
                storage.resize_(form["bytes"])
            if tensor.is_leaf:
                tensor.requires_grad_(form["requires_grad"])
            whole = torch.empty(0, dtype=form["dtype"], device=storage.device)
            tensor.data = whole.set_(storage, form["offset"], form["shape"], form["strides"])
            yield from (f"{part} of {name} was {form[part]}, is {now[part]}" for part in changed)
    now = dict(_fields("metadata", metadata))
    yield from (f"{name} was replaced" for name, old in before.items() if now.get(name) != old)


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    storage = torch.Tensor.untyped_storage(tensor)
    return {
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "address": storage.data_ptr(),
        "bytes": storage.nbytes(),
    }


def _fields(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """By name: a plain value itself, the items of a list, and of any other object which one it is."""
    yield name, value if isinstance(value, _KEPT) else tuple(value) if type(value) is list else id(value)
    if is_dataclass(value):
        for field in fields(value):
            yield from _fields(f"{name}.{field.name}", getattr(value, field.name, None))


def states_of(problem: Problem, returned: Sequence[Returned]) -> list[OutputAndLse]:
    """What is to be merged, as a layer merges it: chunks or ranks in order, then new tokens; empty where nothing is."""
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
