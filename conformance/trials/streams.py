"""Calls on streams other than the default one: inputs that are produced late, and two instances side by side.

The operands hold poison, and the offsets and lengths zeros, until the caller's stream has spun for a while; a kernel
that is launched on another stream, or a result that is ready only there, is computed from that.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from mla_conformance.problems.memory import storage_bytes
from mla_conformance.problems.problem import Problem
from mla_conformance.trials.trial import Trial, observed, prepared_call, tensors

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
    expectation = trial.context.expect(problem)
    trial.call("before the stream: the call", partial(prepared_call, trial.backend, problem))
    late = trial.query("on a side stream: the call", partial(_late_calls, [trial.backend], [problem]))
    value = trial.call("on a side stream: the call", partial(_result, late, 0))
    trial.judged(problem, expectation, observed(problem, value), "inputs produced late on a side stream")


def two_streams(trial: Trial, other: Problem) -> None:
    """Two instances, each with its own problem on its own stream, launched one after the other and never waited for."""
    problems, backends = [trial.problem, other], [trial.backend, trial.create()]
    golden = [trial.context.expect(problem) for problem in problems]
    for problem, backend in zip(problems, backends, strict=True):
        # What is compiled or allocated at a first call is no part of the question.
        trial.call("before the streams: the call", partial(prepared_call, backend, problem))
    for number in range(_ROUNDS):
        late = trial.query("on two streams at once: the call", partial(_late_calls, backends, problems))
        for index, (problem, expectation) in enumerate(zip(problems, golden, strict=True)):
            value = trial.call("on two streams at once: the call", partial(_result, late, index))
            step = f"two instances on two streams, round {number}"
            trial.judged(problem, expectation, observed(problem, value), step)


def _late_calls(backends: Sequence[Any], problems: Sequence[Problem]) -> list[Any]:
    """What each instance returned on a stream of its own, all of them launched before any is waited for."""
    device = problems[0].device
    streams = [_stream(device) for _ in problems]
    late = [_Late(problem) for problem in problems]
    pending = [_late_call(*each) for each in zip(backends, problems, late, streams, strict=True)]
    torch.cuda.synchronize(device)
    return pending


def _result(values: Sequence[Any], index: int) -> Any:
    return values[index]


def _late_call(backend: Any, problem: Problem, late: _Late, stream: torch.cuda.Stream) -> Any:
    """Launch everything on ``stream``; copies of the result, taken there."""
    late.take_away()
    stream.wait_stream(torch.cuda.current_stream(problem.device))
    with torch.cuda.stream(stream):
        late.give_back()
        value = prepared_call(backend, problem)
        # Read where the caller would read it: what is written later, or elsewhere, is not in the copy.
        copies = [tensor.clone() for tensor in tensors(value)]
    whole = isinstance(value, tuple | list) and len(copies) == len(value)
    return tuple(copies) if whole else (copies[0] if isinstance(value, torch.Tensor) else value)
