"""A layer's decode in a graph: buffers of the captured size are filled with a batch, and the graph is replayed.

On a device without graphs the replay is a call over the same buffers, so all but the capture is judged there.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.calls import Problem
from mla_conformance.problems.memory import poison
from mla_conformance.roles.layer.call import LayerCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials.graph import captured
from mla_conformance.trials.trial import Trial

_LONGER, _UNUSED_COLUMNS = 2, 8
"""Times the longest sequence of a case that a replay may have, and columns of the block tables behind its pages."""


class CapturedLayer:
    """What the capture of a layer's call, whose tensors are the buffers, leaves where it was made."""

    def __init__(self, layer: Any, call: LayerCall, device: torch.device) -> None:
        self._layer, self._call, size = layer, call, call.query.shape[0]
        # Made before the capture: its scales come from the host.
        self._module = layer.attention_layer(call.case)
        call.prepare(layer)
        runner, longest = layer.state.runner, _LONGER * max(call.key_lens)
        runner.graph_block_tables = np.zeros((size, longest // call.case.page + _UNUSED_COLUMNS), np.int32)
        runner.max_seq_len_to_capture = longest
        call.image.reset()
        with layer.state.graph_capture(size):
            self._metadata = layer.state.graph_capture_get_metadata_for_batch(size)
            self._buffers = layer.state.get_graph_input_buffers(self._metadata)
            layer.impl.prepare(self._metadata)
            self._replay, self._value = captured(device, self._forward)
        self._addresses = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}

    def load(self, call: LayerCall) -> None:
        """The metadata of a batch, into the buffers that the state has for it."""
        call.prepare(self._layer)
        self.fill_buffers()
        self._layer.impl.prepare(self._metadata)

    def fill_buffers(self) -> None:
        """Those of the state, with the metadata that were prepared last."""
        self._layer.state.prepare_graph_input_buffers(self._buffers, self._layer.metadata)

    def replayed(self, call: LayerCall) -> torch.Tensor:
        """What a replay leaves in the captured output; ``call`` brings what its tensors, the buffers, hold now."""
        self._value.fill_(torch.nan)
        value: torch.Tensor = self._replay()
        return value

    def moved(self) -> list[str]:
        """Buffers of the state that are no longer where they were."""
        return [name for name, buffer in self._buffers.items() if buffer.data_ptr() != self._addresses[name]]

    def _forward(self) -> torch.Tensor:
        operands = (self._call.query, self._call.kv_c, self._call.k_pe, self._call.image.cache)
        value: torch.Tensor = self._layer.impl.forward(self._module, *operands, self._metadata)
        return value


class LayerGraph:
    """A captured call of a layer, and with how many requests, its ``size``."""

    def __init__(self, trial: Trial, static: Problem) -> None:
        self._trial = trial
        call = static.calls[0]
        assert isinstance(call, LayerCall)
        self.size = call.query.shape[0]
        self._call = replace(call, **{name: getattr(call, name).clone() for name in ("query", "kv_c", "k_pe")})
        capture = partial(CapturedLayer, trial.backend, self._call, static.device)
        self._captured = trial.query("captured: the call", capture)

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with ``problem``, replay, judge."""
        expectation = self._trial.context.expect(problem)
        call = problem.calls[0]
        assert isinstance(call, LayerCall)
        self._trial.query(f"{step}: the call", partial(CapturedLayer.load, self._captured, call))
        self._load(call)
        replay = partial(CapturedLayer.replayed, self._captured, self._call)
        result = self._trial.call(f"{step}: the call", replay, [self._call.image.cache]).unflatten(
            -1, (problem.case.heads, -1)
        )
        rows = call.query.shape[0]
        self._settle(problem, expectation, result[:rows], step)
        written = result[rows:].ne(0).flatten(1).any(dim=1)
        what = f"{step}: the output is not 0 in {int(written.sum())} rows of padding behind the {rows} of the batch"
        self._trial.require(not bool(written.any()), Check.MASK, what)

    def refuses(self, problem: Problem, step: str) -> None:
        """A batch larger than the captured one must not be loaded; whatever the state raises, it is a refusal."""
        trial, executor = self._trial, self._trial.subject.executor
        trial.query(f"{step}: prepare", partial(problem.calls[0].prepare, trial.backend))
        done = executor.query(partial(CapturedLayer.fill_buffers, self._captured))
        if done.out_of_memory:
            trial.settle(Verdict(Status.UNAVAILABLE, f"out of memory: {done.error}"))
        trial.require(bool(done.error), Check.UNSAFE_REFUSAL, f"{step}: it was loaded into the graph's buffers")
        what = f"{step}: it launched before it raised {done.error}"
        trial.require(not executor.lost(problem.device), Check.UNSAFE_REFUSAL, what)

    def _load(self, call: LayerCall) -> None:
        """The batch's tensors into the buffers, its cache into the captured one."""
        for name in ("query", "kv_c", "k_pe"):
            buffer, rows = getattr(self._call, name), getattr(call, name)
            buffer.copy_(-poison(buffer.shape, buffer.dtype, buffer.device))
            buffer[: len(rows)].copy_(rows)
        call.image.reset()
        own, behind = self._cache(call)
        own.copy_(call.image.cache)
        self._behind = behind.clone()

    def _cache(self, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of the captured cache that ``call`` has, and those behind them."""
        blocks = len(call.image.cache)
        return self._call.image.cache[:blocks], self._call.image.cache[blocks:]

    def _settle(self, problem: Problem, expectation: Golden, result: torch.Tensor, step: str) -> None:
        call = problem.calls[0]
        assert isinstance(call, LayerCall)
        own, behind = self._cache(call)
        call.image.cache.copy_(own)
        returned = Returned(call, result.clone(), miswritten=call.wrong_writes())
        self._trial.judged(problem, expectation, Observation((returned,), None, ()), step)
        intact = torch.equal(behind.view(torch.uint8), self._behind.view(torch.uint8))
        self._trial.require(intact, Check.CACHE, f"{step}: blocks were written that no request of the batch has")
        moved = self._trial.query(step, partial(CapturedLayer.moved, self._captured), list[str])
        self._trial.require(not moved, Check.STALE_RESULT, f"{step}: {', '.join(moved)} moved to another address")


def replays(trial: Trial) -> None:
    """Batches of every size up to the captured one; the next larger one is refused, and runs without the graph."""
    case, size = trial.case, len(trial.case.q)
    assert isinstance(case, LayerCase)
    # Its first sequence, new token included, is as long as a replay's may be.
    longest = replace(case, kv=(_LONGER * (max(case.kv) + 1) - 1, *case.kv[1:]), seed=case.seed + 8)
    graph = LayerGraph(trial, trial.build(replace(case, spare=case.spare + -(-max(longest.kv) // case.page))))
    graph.judge(_batch(trial, case, size, 2), "a batch of the captured size, replayed")
    graph.judge(_batch(trial, case, size // 2, 3), "half of it, replayed with padding")
    graph.judge(_batch(trial, case, size, 7), "another batch of the captured size, replayed after a smaller one")
    graph.judge(_batch(trial, case, 1, 4), "a single request, replayed with padding")
    graph.judge(trial.build(longest), "a sequence as long as the graph admits, replayed")
    larger = _batch(trial, replace(case, q=(*case.q, 1), kv=(*case.kv, 9), decodes=size + 1), size + 1, 5)
    graph.refuses(larger, "one request more than captured")
    trial.conforms(larger, step="one request more than captured, without the graph")
    graph.judge(_batch(trial, case, size, 6), "replayed after a call without the graph")


def _batch(trial: Trial, case: LayerCase, requests: int, seed: int) -> Problem:
    """So many of the requests in an order of its own, most of them shorter, so that no row keeps its length."""
    drawn = random.Random(case.seed + seed)
    kv = tuple(drawn.choice((length, length // 2, length // 3)) for length in drawn.sample(case.kv, requests))
    return trial.build(replace(case, q=(1,) * requests, kv=kv, decodes=requests, seed=case.seed + seed))
