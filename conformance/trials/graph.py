"""CUDA graphs: a batch is captured in static buffers, which then receive other batches and are replayed.

What an engine does: buffers of the captured size keep their addresses; before each replay they are filled with a batch
that is as large or smaller, its metadata is prepared on the host, and the result is read where the captured call left
it. On a device without graphs the replay is a call with the same buffers, so that all but the capture is judged there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mla_conformance.cases.case import Case
from mla_conformance.problems.problem import Problem
from mla_conformance.trials import batches
from mla_conformance.trials.launch import cut, guarded, invoke, observed, prepare, tensors
from mla_conformance.trials.trial import Trial

_WARM_CALLS = 2
_stream: Any = torch.cuda.Stream


class Graph:
    """A captured call with its buffers.

    Attributes:
        static: the problem whose tensors are the buffers; no batch has more requests, or a longer one.
    """

    def __init__(self, trial: Trial, what: str, static: Problem) -> None:
        self.static, self._trial = static, trial
        loaded = _load(static, trial.build(batches.captured(static.case)))
        self._captured = trial.make(f"{what}: the call", partial(_capture, trial.backend, loaded))

    def batch(self, requests: int, seed: int) -> Problem:
        """So many requests with lengths drawn anew, and padding up to the captured number."""
        return self._trial.build(batches.replayed(self.static.case, requests, seed))

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with ``problem``, replay, and judge what stands in the captured outputs."""
        expectation = self._trial.expect(problem)
        loaded = _load(self.static, problem)
        value = guarded(self._trial, step, partial(_replayed, self._captured, self._trial.backend, loaded))
        # Behind them a prefill may leave anything; the rows of a decode are all there, those of padding among them.
        seen = observed(problem, cut(value, slice(problem.calls[0].q.shape[0])))
        self._trial.judged(problem, expectation, seen, step)


def replays(trial: Trial) -> None:
    """Two sizes captured by one instance; batches of every size up to the larger, and one beyond it without a graph."""
    case = trial.case
    size, smaller = len(case.q), len(case.q) // 2
    whole = Graph(trial, "captured", trial.problem)
    half = Graph(trial, "captured once more", trial.build(_first(case, smaller)))
    whole.judge(whole.batch(size, seed=2), "a batch of the captured size, replayed")
    half.judge(half.batch(smaller, seed=3), "the smaller graph, replayed after the larger")
    whole.judge(whole.batch(smaller + 1, seed=4), "one request more than the smaller graph has, replayed with padding")
    half.judge(half.batch(1, seed=5), "a single request, replayed with padding")
    trial.conforms(trial.build(_beyond(case)), step="one request more than any graph has, called")
    whole.judge(whole.batch(size, seed=6), "replayed after a call without a graph")


def _first(case: Case, requests: int) -> Case:
    """The first so many requests."""
    return replace(case, q=case.q[:requests], kv=case.kv[:requests])


def _beyond(case: Case) -> Case:
    """One request more than ``case`` has."""
    return replace(case, q=(*case.q, case.q[0]), kv=(*case.kv, *case.kv[:1]))


def _load(static: Problem, other: Problem) -> Problem:
    """``static``, whose buffers now begin with the values of ``other``; the rest of them is left as it was."""
    theirs = other.caller_owned
    for name, buffer in static.caller_owned.items():
        buffer[tuple(slice(size) for size in theirs[name].shape)].copy_(theirs[name])
    mine: Any = static.calls[0]
    call: Any = other.calls[0]
    return replace(static, calls=(replace(mine, metadata=_with_host_lengths(mine.metadata, call.metadata)),))


def _with_host_lengths(metadata: Any, other: Any) -> Any:
    """``metadata``, whose buffers and maxima stay, with what ``other`` says on the host."""
    return replace(metadata, **{name: value for name, value in vars(other).items() if name.endswith("_cpu")})


_Captured = tuple[Callable[[], Any], Any]
"""(replay, what the captured call returned); the replay returns it again."""


def _capture(backend: Any, problem: Problem) -> _Captured:
    prepare(backend, problem)
    return captured(problem.device, partial(invoke, backend, problem))


def _replayed(graph: _Captured, backend: Any, problem: Problem) -> Any:
    """What stands in the captured outputs after a replay over what the buffers hold now."""
    replay, value = graph
    for tensor in tensors(value):
        tensor.fill_(torch.nan)
    prepare(backend, problem)
    return replay()


def captured(device: torch.device, call: Callable[[], Any]) -> _Captured:
    """A call in a graph; on a device without graphs the replay is the call."""
    if device.type != "cuda":
        return call, call()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_CALLS):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = call()

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize(device)
        return value

    return replay, value
