"""CUDA graphs as engines use them: a batch is captured in buffers, which then receive other batches and are replayed.

On a device without graphs the replay is a call with the same buffers, so that all but the capture is judged there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from mla_conformance.backends.roles import Role
from mla_conformance.cases.case import Case
from mla_conformance.cases.grammar import LARGEST
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.trials.trial import Trial, cut, observed, tensors

_WARM_CALLS = 2
_stream: Any = torch.cuda.Stream


class Graph:
    """A captured call with its buffers, the tensors of ``static``; no batch has more requests, or a longer one.

    The buffers hold ``batch`` when the call is captured, by default one that is half as long as they are.
    """

    def __init__(self, trial: Trial, what: str, static: Problem, batch: Case | None = None) -> None:
        self.static, self._trial = static, trial
        loaded = _load(static, trial.build(batch or captured_batch(static.case)))
        made = partial(loaded.calls[0].invoke, trial.backend, None)
        self._captured = trial.query(f"{what}: the call", partial(capture, trial.backend, loaded.calls[0], made))

    def batch(self, requests: int, seed: int) -> Problem:
        """So many requests with lengths drawn anew, and padding up to the captured number."""
        return self._trial.build(replayed_batch(self.static.case, requests, seed))

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with ``problem``, replay, and judge what stands in the captured outputs."""
        expectation = self._trial.context.expect(problem)
        (call,) = _load(self.static, problem).calls
        value = self._trial.call(f"{step}: the call", partial(replayed, self._captured, self._trial.backend, call))
        # Behind them a prefill may leave anything; the rows of a decode are all there, those of padding among them.
        seen = observed(problem, cut(value, slice(problem.calls[0].q.shape[0])))
        self._trial.judged(problem, expectation, seen, step)


def replays(trial: Trial) -> None:
    """Two sizes captured by one instance, batches up to the larger and beyond it, then one of a token a request."""
    case = trial.case
    size, smaller = len(case.q), len(case.q) // 2
    larger = replace(case, q=(*case.q, case.q[0]), kv=(*case.kv, *case.kv[:1]))
    whole = Graph(trial, "captured", trial.problem)
    half = Graph(trial, "captured once more", trial.build(replace(case, q=case.q[:smaller], kv=case.kv[:smaller])))
    whole.judge(whole.batch(size, seed=2), "a batch of the captured size, replayed")
    half.judge(half.batch(smaller, seed=3), "the smaller graph, replayed after the larger")
    whole.judge(whole.batch(smaller + 1, seed=4), "one request more than the smaller graph has, replayed with padding")
    half.judge(half.batch(1, seed=5), "a single request, replayed with padding")
    trial.conforms(trial.build(larger), step="one request more than any graph has, called")
    whole.judge(whole.batch(size, seed=6), "replayed after a call without a graph")
    short = Graph(trial, "captured with a token a request", trial.build(), _filled(case, 1, seed=7))
    short.judge(trial.build(_filled(case, LARGEST, seed=8)), "many pages longer than captured, replayed")


def _load(static: Problem, other: Problem) -> Problem:
    """``static``, whose buffers now begin with the values of ``other``; the rest of them is left as it was."""
    theirs = other.caller_owned
    for name, buffer in static.caller_owned.items():
        buffer[tuple(slice(size) for size in theirs[name].shape)].copy_(theirs[name])
    mine: Any = static.calls[0]
    call: Any = other.calls[0]
    # Of the metadata, whose buffers and maxima stay, with what is said on the host.
    told = {name: value for name, value in vars(call.metadata).items() if name.endswith("_cpu")}
    return replace(static, calls=(replace(mine, metadata=replace(mine.metadata, **told)),))


def captured_batch(case: Case) -> Case:
    """The batch that is captured over the buffers of ``case``: its requests the other way round, half as long."""
    lengths = [-(-length // 2) for length in reversed(_lengths(case))]
    return _with_lengths(case, lengths, padding=0, seed=1)


def _filled(case: Case, most: int, seed: int) -> Case:
    """A batch of as many requests, as long as the buffers have room for, or of ``most`` if that is shorter."""
    return _with_lengths(case, [min(most, length) for length in _lengths(case)], padding=0, seed=seed)


def replayed_batch(case: Case, requests: int, seed: int) -> Case:
    """A batch that fits the buffers of ``case``: so many requests, and padding up to the captured number.

    Rows grow and shrink from replay to replay; one is as long as when it was captured, one has no token, one a single.
    """
    if case.role is not Role.PREFILL and max(case.q) > 1:
        requests = len(case.q)  # a row of padding has one token, so that such a batch is never smaller
    draw, rooms = Random(f"{case.id}|{requests}|{seed}"), _lengths(case)[::-1]
    order = draw.sample(range(len(rooms)), len(rooms))
    special = draw.sample(range(requests), min(3, requests - 1))
    for row in special[:1]:  # its own room is the one that the captured length fits
        there = order.index(row)
        order[row], order[there] = row, order[row]
    lengths = [draw.choice((rooms[room], draw.randint(min(1, rooms[room]), rooms[room]))) for room in order[:requests]]
    for row, length in zip(special, (-(-rooms[order[special[0]]] // 2) if special else 0, 0, 1), strict=False):
        lengths[row] = min(length, rooms[order[row]])
    return _with_lengths(case, lengths, len(case.q) - requests, seed)


def _lengths(case: Case) -> tuple[int, ...]:
    """What differs between the batches of a graph: new tokens of a prefill, the context of a decode."""
    return case.q if case.role is Role.PREFILL else case.kv


def _with_lengths(case: Case, lengths: list[int], padding: int, seed: int) -> Case:
    if case.role is Role.PREFILL:
        return replace(case, q=(*lengths, *(0,) * padding), seed=case.seed + seed)
    return replace(case, q=case.q[: len(lengths)], kv=tuple(lengths), pad=padding, seed=case.seed + seed)


_Captured = tuple[Callable[[], Any], Any]
"""(replay, what the captured call returned); the replay returns it again."""


def capture(backend: Any, call: KernelCall, made: Callable[[], Any]) -> _Captured:
    call.prepare(backend)
    return captured(call.q.device, made)


def replayed(graph: _Captured, backend: Any, call: KernelCall) -> Any:
    """What stands in the captured outputs after a replay over what the buffers hold now."""
    replay, value = graph
    for tensor in tensors(value):
        tensor.fill_(torch.nan)
    call.prepare(backend)
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
