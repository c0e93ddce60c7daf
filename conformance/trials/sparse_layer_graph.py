"""A sparse layer's decodes in a graph: buffers of the captured size are filled with a batch, and the graph is replayed.

On a device without graphs the replay is a call over the same buffers, so all but the capture is judged there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.verdict import Check
from mla_conformance.problems.calls import Problem
from mla_conformance.roles.sparse_layer.call import SparseLayerCall
from mla_conformance.roles.sparse_layer.case import SparseLayerCase
from mla_conformance.trials.graph import captured
from mla_conformance.trials.trial import Trial, cut


def replays(trial: Trial) -> None:
    """Batches of every size up to the captured one, with padding behind them, and one beyond it without the graph."""
    case = trial.case
    assert isinstance(case, SparseLayerCase)
    size = len(case.q)
    graph = SparseLayerGraph(trial)
    graph.judge(graph.batch(size, 2), "a batch of the captured size, replayed")
    graph.judge(graph.batch(size - 1, 3), "one request fewer, replayed with padding")
    graph.judge(graph.batch(1, 4), "a single request, replayed with padding")
    graph.judge(trial.problem, "sequences as long as the buffers have room for, replayed after shorter ones")
    beyond = replace(case, q=(*case.q, 1), kv=(*case.kv, 9), decodes=size + 1)
    trial.conforms(trial.build(beyond), step="one request more than captured, called")
    graph.judge(graph.batch(size, 5), "replayed after a call without the graph")


class SparseLayerGraph:
    """A captured call over the buffers of the largest batch."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._static = _call(trial.build(replace(trial.case, seed=trial.case.seed + 9)))
        loaded = self._load(_call(self.batch(len(trial.case.q), 1)))
        self._captured = trial.query("captured: the call", partial(_capture, trial.backend, loaded))

    def batch(self, requests: int, seed: int) -> Problem:
        """So many of the requests in an order of their own, some of them shorter, and padding behind them."""
        case, draw = self._trial.case, Random(f"{self._trial.case.id}|{requests}|{seed}")
        kv = tuple(draw.choice((length, length // 2)) for length in draw.sample(case.kv, requests))
        padding = len(case.q) - requests
        other: dict[str, Any] = {
            "q": (1,) * requests,
            "kv": kv,
            "decodes": requests,
            "pad": padding,
            "seed": case.seed + seed,
        }
        return self._trial.build(replace(case, **other))

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with a batch, replay, and judge what stands in the captured output and in the caches."""
        expectation, call = self._trial.context.expect(problem), _call(problem)
        loaded, reached = self._load(call), [image.cache for image in self._static.written.values()]
        replay = partial(_replayed, self._captured, self._trial.backend, loaded)
        value = cut(self._trial.call(f"{step}: the call", replay, reached), slice(len(call.q)))
        for name, image in call.written.items():
            own = self._static.written[name].cache
            image.cache.copy_(own[: len(image.cache)])
            intact = torch.equal(own[len(image.cache) :].view(torch.uint8), self._behind[name])
            self._trial.require(intact, Check.WRITTEN, f"{step}: {name} was written where the batch has no block")
        returned = Returned(call, value.clone(), miswritten=call.wrong_writes())
        self._trial.judged(problem, expectation, Observation((returned,), None, ()), step)

    def _load(self, call: SparseLayerCall) -> SparseLayerCall:
        """The buffers, which now begin with the tensors of a batch; what it says on the host it says itself."""
        theirs = call.owned()
        for name, buffer in self._static.owned().items():
            if not name.endswith("_cpu"):
                buffer[tuple(map(slice, theirs[name].shape))].copy_(theirs[name])
        for name, image in call.written.items():
            image.reset()
            self._static.written[name].cache[: len(image.cache)].copy_(image.cache)
        written = {name: (len(image.cache), self._static.written[name].cache) for name, image in call.written.items()}
        self._behind = {name: cache[count:].view(torch.uint8).clone() for name, (count, cache) in written.items()}
        mine, own = self._static.metadata, call.metadata
        parts = {}
        for name in ("attention", "index"):  # whose buffers and maxima stay, with what is said on the host
            told = {each: value for each, value in vars(getattr(own, name)).items() if each.endswith("_cpu")}
            parts[name] = replace(getattr(mine, name), **told)
        return replace(self._static, metadata=replace(mine, **parts, num_decodes=own.num_decodes))


def _call(problem: Problem) -> SparseLayerCall:
    (call,) = problem.calls
    assert isinstance(call, SparseLayerCall)
    return call


def _capture(backend: Any, call: SparseLayerCall) -> tuple[Callable[[], Any], Any]:
    call.prepare(backend)
    return captured(call.q.device, partial(call.run, backend))


def _replayed(graph: tuple[Callable[[], Any], Any], backend: Any, call: SparseLayerCall) -> Any:
    """What stands in the captured output after a replay over what the buffers hold now."""
    replay, value = graph
    value.fill_(torch.nan)
    call.prepare(backend)
    return replay()
