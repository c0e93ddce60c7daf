"""Calls on streams other than the default one: inputs that are produced late, and two instances side by side.

The operands hold poison, and the offsets and lengths zeros, until the caller's stream has spun for a while; a kernel
that is launched on another stream, or a result that is ready only there, is computed from that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem
from mla_conformance.trials.launch import guarded, observed, prepared_call, tensors
from mla_conformance.trials.trial import Trial

_SPIN_CYCLES = 20_000_000
"""About 10 ms of a GPU: longer than any launch and any copy of a case."""
_POISON_BYTE = 0xFF
_ROUNDS = 5
_stream: Any = torch.cuda.Stream
_spin: Any = torch.cuda._sleep


class _Late:
    """The inputs of a problem, taken away now and given back on a stream."""

    def __init__(self, problem: Problem) -> None:
        owned = problem.caller_owned.values()
        self.kept = [(x, storage_bytes(x).clone()) for x in owned if x.is_cuda and x.untyped_storage().nbytes()]

    def take_away(self) -> None:
        """Poison in the operands; no request has a token."""
        for tensor, _ in self.kept:
            storage_bytes(tensor).fill_(_POISON_BYTE if tensor.is_floating_point() else 0)

    def give_back(self) -> None:
        """On the current stream, after a while."""
        _spin(_SPIN_CYCLES)
        for tensor, data in self.kept:
            storage_bytes(tensor).copy_(data)


def side_stream(trial: Trial) -> None:
    """Inputs produced on a side stream, the call and the reading of its result on the same one."""
    problem = trial.problem
    stream, expectation = _stream(problem.device), trial.expect(problem)
    guarded(trial, "before the stream", lambda: prepared_call(trial.backend, problem))
    results = guarded(trial, "on a side stream", lambda: _late_call(trial.backend, problem, stream))
    torch.cuda.synchronize(problem.device)
    trial.judged(problem, expectation, observed(problem, results()), "inputs produced late on a side stream")


def two_streams(trial: Trial, other: Problem) -> None:
    """Two instances, each with its own problem on its own stream, launched one after the other and never waited for."""
    first, second = (trial.problem, trial.backend), (other, trial.create())
    golden = [trial.expect(problem) for problem, _ in (first, second)]
    for problem, backend in (first, second):
        # What is compiled or allocated at a first call is no part of the question.
        guarded(trial, "before the streams", partial(prepared_call, backend, problem))
    streams = [_stream(trial.problem.device) for _ in range(2)]
    for number in range(_ROUNDS):
        pending = [
            guarded(trial, "on two streams at once", partial(_late_call, backend, problem, stream))
            for (problem, backend), stream in zip((first, second), streams, strict=True)
        ]
        torch.cuda.synchronize(trial.problem.device)
        for (problem, _), expectation, result in zip((first, second), golden, pending, strict=True):
            step = f"two instances on two streams, round {number}"
            trial.judged(problem, expectation, observed(problem, result()), step)


def _late_call(backend: Any, problem: Problem, stream: torch.cuda.Stream) -> Callable[[], Any]:
    """Launch everything on ``stream``; the result can be taken once it is done."""
    late = _Late(problem)
    late.take_away()
    stream.wait_stream(torch.cuda.current_stream(problem.device))
    with torch.cuda.stream(stream):
        late.give_back()
        value = prepared_call(backend, problem)
        # Read where the caller would read it: what is written later, or elsewhere, is not in the copy.
        copies = [tensor.clone() for tensor in tensors(value)]

    def result() -> Any:
        late.kept.clear()  # until now: memory that the stream still reads must not be handed out again
        whole = isinstance(value, tuple | list) and len(copies) == len(value)
        return tuple(copies) if whole else (copies[0] if isinstance(value, torch.Tensor) else value)

    return result
