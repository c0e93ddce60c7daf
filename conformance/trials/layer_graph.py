"""A layer's decode in a graph: buffers of the captured size are filled with a batch, and the graph is replayed.

On a device without graphs the replay is a call over the same buffers, so all but the capture is judged there.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mla_conformance.cases.layer import LayerCase
from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.expected import Expected
from mla_conformance.judging.verdict import Check
from mla_conformance.problems.layer_call import LayerCall
from mla_conformance.problems.memory import device_lost, poison
from mla_conformance.problems.problem import Problem
from mla_conformance.trials.graph import captured
from mla_conformance.trials.launch import guarded
from mla_conformance.trials.trial import Trial


class LayerGraph:
    """A captured call of a layer.

    Attributes:
        size: requests that it was captured with.
    """

    def __init__(self, trial: Trial, static: Problem) -> None:
        self._trial, self._layer = trial, trial.backend
        call = static.calls[0]
        assert isinstance(call, LayerCall)
        self.size = call.query.shape[0]
        self._call = replace(call, **{name: getattr(call, name).clone() for name in ("query", "kv_c", "k_pe")})
        # Made before the capture: its scales come from the host.
        self._module = self._layer.attention_layer(call.case)
        call.prepare(self._layer)
        runner = self._layer.state.runner
        runner.graph_block_tables = np.zeros((self.size, self._layer.metadata.block_tables.shape[1] + 8), np.int32)
        runner.max_seq_len_to_capture = 2 * max(self._layer.metadata.seq_lens)
        call.image.reset()
        with self._layer.state.graph_capture(self.size):
            self._metadata = self._layer.state.graph_capture_get_metadata_for_batch(self.size)
            self._buffers = self._layer.state.get_graph_input_buffers(self._metadata)
            self._layer.impl.prepare(self._metadata)
            self._replay, self._value = captured(static.device, self._forward)
        self._addresses = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with ``problem``, replay, judge."""
        expectation = self._trial.expect(problem)
        call = problem.calls[0]
        assert isinstance(call, LayerCall)
        guarded(self._trial, step, lambda: self._load(problem, call))
        self._value.fill_(torch.nan)
        result = guarded(self._trial, step, self._replay).unflatten(-1, (problem.case.heads, -1))
        rows = call.query.shape[0]
        self._settle(problem, expectation, result[:rows], step)
        written = result[rows:].ne(0).flatten(1).any(dim=1)
        what = f"{step}: the output is not 0 in {int(written.sum())} rows of padding behind the {rows} of the batch"
        self._trial.require(not bool(written.any()), Check.MASK, what)

    def refuses(self, problem: Problem, step: str) -> None:
        """A batch larger than the captured one must not be loaded; whatever the state raises, it is a refusal."""
        problem.calls[0].prepare(self._layer)
        try:
            self._fill_buffers()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            lost = device_lost(problem.device)
            self._trial.require(not lost, Check.UNSAFE_REFUSAL, f"{step}: it launched before it raised {error}")
            return
        self._trial.require(False, Check.UNSAFE_REFUSAL, f"{step}: it was loaded into the graph's buffers")

    def _forward(self) -> torch.Tensor:
        layer = self._layer
        operands = (self._call.query, self._call.kv_c, self._call.k_pe)
        value: torch.Tensor = layer.impl.forward(self._module, *operands, self._call.image.cache, self._metadata)
        return value

    def _fill_buffers(self) -> None:
        self._layer.state.prepare_graph_input_buffers(self._buffers, self._layer.metadata)

    def _load(self, problem: Problem, call: Any) -> None:
        """The batch's tensors into the buffers, its cache into the captured one."""
        call.prepare(self._layer)
        self._fill_buffers()
        self._layer.impl.prepare(self._metadata)
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

    def _settle(self, problem: Problem, expectation: Expected, result: torch.Tensor, step: str) -> None:
        call = problem.calls[0]
        assert isinstance(call, LayerCall)
        own, behind = self._cache(call)
        call.image.cache.copy_(own)
        returned = Returned(call, result.clone(), miswritten=call.wrong_writes())
        self._trial.judged(problem, expectation, Observation((returned,), None, ()), step)
        intact = torch.equal(behind.view(torch.uint8), self._behind.view(torch.uint8))
        self._trial.require(intact, Check.CACHE, f"{step}: blocks were written that no request of the batch has")
        moved = [name for name, buffer in self._buffers.items() if buffer.data_ptr() != self._addresses[name]]
        self._trial.require(not moved, Check.STALE_RESULT, f"{step}: {', '.join(moved)} moved to another address")


def replays(trial: Trial) -> None:
    """Batches of every size up to the captured one; the next larger one is refused, and runs without the graph."""
    case, size = trial.case, len(trial.case.q)
    assert isinstance(case, LayerCase)
    graph = guarded(trial, "captured", lambda: LayerGraph(trial, trial.problem))
    graph.judge(_batch(trial, case, size, 2), "a batch of the captured size, replayed")
    graph.judge(_batch(trial, case, size // 2, 3), "half of it, replayed with padding")
    graph.judge(_batch(trial, case, size, 7), "another batch of the captured size, replayed after a smaller one")
    graph.judge(_batch(trial, case, 1, 4), "a single request, replayed with padding")
    larger = _batch(trial, replace(case, q=(*case.q, 1), kv=(*case.kv, 9), decodes=size + 1), size + 1, 5)
    graph.refuses(larger, "one request more than captured")
    trial.conforms(larger, step="one request more than captured, without the graph")
    graph.judge(_batch(trial, case, size, 6), "replayed after a call without the graph")


def _batch(trial: Trial, case: LayerCase, requests: int, seed: int) -> Problem:
    """So many of the requests in an order of its own, most of them shorter, so that no row keeps its length."""
    drawn = random.Random(case.seed + seed)
    kv = tuple(drawn.choice((length, length // 2, length // 3)) for length in drawn.sample(case.kv, requests))
    return trial.build(replace(case, q=(1,) * requests, kv=kv, decodes=requests, seed=case.seed + seed))
