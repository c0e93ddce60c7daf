"""What only layers are asked: what their backends say of a cache and do to its blocks, weights in codes, and graphs."""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch

from mla_conformance.driving.driver import Observation, Returned
from mla_conformance.judging.golden import Golden
from mla_conformance.judging.verdict import Check, Status, Verdict
from mla_conformance.problems.calls import KernelCall, Problem
from mla_conformance.problems.memory import poison, storage_bytes
from mla_conformance.reference.cache_layout import copy_blocks, swap_blocks
from mla_conformance.roles.layer.call import Layer, LayerCall
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.roles.sparse_layer.call import SparseLayerCall
from mla_conformance.roles.sparse_layer.case import SparseLayerCase
from mla_conformance.trials.graph import capture, captured, replayed
from mla_conformance.trials.trial import Trial, cut

AnyCall = TypeVar("AnyCall", bound=KernelCall)
_OTHER_LAYERS = 2
_OPERANDS = ("query", "kv_c", "k_pe")
_LONGER, _UNUSED_COLUMNS = 2, 8
"""Times the longest sequence of a case that a replay may have, and columns of the block tables behind its pages."""


def _call_of(problem: Problem, kind: type[AnyCall]) -> AnyCall:
    (call,) = problem.calls
    assert isinstance(call, kind)
    return call


def shapes_cache(trial: Trial) -> None:
    """``get_kv_cache_shape`` names the entries that the layout has."""
    image = _call_of(trial.problem, LayerCall).image
    case, (blocks, page, width) = image.case, image.cache.shape
    head_size = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    question = partial(_cache_shape, trial.backend, (blocks, page, 1, head_size), case.cache)
    shape = trial.query("get_kv_cache_shape: the call", question, list[int])
    what = f"get_kv_cache_shape for the layout {case.cache}: expected {[blocks, page, width]}, got {shape}"
    trial.require(shape == [blocks, page, width], Check.CACHE, what)


def moves_blocks(trial: Trial) -> None:
    """``copy_blocks`` and ``swap_blocks`` of the layer's backend leave the bytes that the reference leaves.

    A source may be copied to several blocks, as a shared one is that two requests are about to write.
    """
    image = _call_of(trial.problem, LayerCall).image
    cache = image.cache
    image.reset()
    # From the first blocks to the last ones, as many as do not meet.
    copies = [(0, len(cache) - 1), (1, len(cache) - 2), (0, len(cache) - 3)]
    pairs = torch.tensor([pair for pair in copies if pair[1] > 1], dtype=torch.int64, device=cache.device).view(-1, 2)
    ours, theirs = _caches(cache), _caches(cache)

    def compare(name: str) -> None:
        for number, (right, got) in enumerate(zip(ours, theirs, strict=True)):
            wrong = int((storage_bytes(right) != storage_bytes(got)).sum())
            what = f"{name}: {wrong} bytes of cache {number} of {len(ours)} are not what they must be"
            trial.require(wrong == 0, Check.CACHE, what)

    copy_blocks(ours, pairs)
    trial.call("copy_blocks", partial(_move_blocks, trial.backend, "copy_blocks", theirs, pairs), theirs)
    compare("copy_blocks")
    for source, target, moved in ((0, 1, pairs + pairs.new_tensor([0, 1])), (1, 0, pairs.flip(1)[:2])):
        swap_blocks(ours[source], ours[target], moved)
        swapped = (theirs[source], theirs[target], moved.cpu())
        trial.call("swap_blocks", partial(_move_blocks, trial.backend, "swap_blocks", *swapped), theirs)
        compare("swap_blocks")


def _caches(cache: torch.Tensor) -> list[torch.Tensor]:
    """A cache with the same bytes and strides in a storage of its own, and one of other strides beside it."""
    storage = storage_bytes(cache).clone().untyped_storage()
    same = torch.empty(0, dtype=cache.dtype, device=cache.device)
    same.set_(storage, cache.storage_offset(), cache.shape, cache.stride())
    blocks, page, width = cache.shape
    layers = cache.stride(0) // (page * width) + _OTHER_LAYERS
    other = torch.zeros(blocks + 1, layers, page, width, dtype=cache.dtype, device=cache.device)[:, 1]
    count = torch.arange(other.numel() * other.element_size(), device=cache.device)
    other.view(torch.uint8).copy_((count % 251).to(torch.uint8).view(other.view(torch.uint8).shape))
    return [same, other]


# Called where the layer is, which may be another process.


def _cache_shape(layer: Layer, sizes: tuple[int, ...], layout: str) -> list[int]:
    return list(layer.backend.get_kv_cache_shape(*sizes, cache_dtype_str=layout))


def _move_blocks(layer: Layer, name: str, *given: Any) -> None:
    getattr(layer.backend, name)(*given)


def loads_packed(trial: Trial) -> None:
    """A new layer computes the same from the same weights in codes."""
    step = "with the weights in codes"
    packed = replace(trial.problem, calls=(replace(_call_of(trial.problem, LayerCall), packed=True),))
    layer = trial.query(f"{step}: the constructor", partial(trial.subject.create, trial.case))
    expectation = trial.context.expect(packed)
    trial.judged(packed, expectation, trial.run(layer, packed), step)


def _judge(trial: Trial, problem: Problem, expectation: Golden, value: Any, step: str) -> None:
    """What a replay returned, and what it left in the caches of the batch's own call."""
    (call,) = problem.calls
    returned = Returned(value.clone(), call=call, miswritten=call.wrong_writes())
    trial.judged(problem, expectation, Observation((returned,), None, ()), step)


class CapturedLayer:
    """What the capture of a layer's call, whose tensors are the buffers, leaves where it was made."""

    def __init__(self, layer: Any, call: LayerCall, device: torch.device) -> None:
        self._layer, size = layer, call.query.shape[0]
        # Made before the capture: its scales come from the host.
        module = layer.attention_layer(call.case)
        call.prepare(layer)
        runner, longest = layer.state.runner, _LONGER * max(call.key_lens)
        runner.graph_block_tables = np.zeros((size, longest // call.case.page + _UNUSED_COLUMNS), np.int32)
        runner.max_seq_len_to_capture = longest
        call.image.reset()
        with layer.state.graph_capture(size):
            self._metadata = layer.state.graph_capture_get_metadata_for_batch(size)
            self._buffers = layer.state.get_graph_input_buffers(self._metadata)
            layer.impl.prepare(self._metadata)
            operands = (call.query, call.kv_c, call.k_pe, call.image.cache)
            self._replay, self._value = captured(
                device, lambda: self._layer.impl.forward(module, *operands, self._metadata)
            )
        self._addresses = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}

    def load(self, call: LayerCall) -> None:
        """The metadata of a batch, into the buffers that the state has for it."""
        call.prepare(self._layer)
        self.fill_buffers()
        self._layer.impl.prepare(self._metadata)

    def fill_buffers(self) -> None:
        """Those of the state, with the metadata that were prepared last."""
        self._layer.state.prepare_graph_input_buffers(self._buffers, self._layer.metadata)

    def replayed(self, call: LayerCall) -> Any:
        """What a replay leaves in the captured output; ``call`` brings what its tensors, the buffers, hold now."""
        self._value.fill_(torch.nan)
        return self._replay()

    def moved(self) -> list[str]:
        """Buffers of the state that are no longer where they were."""
        return [name for name, buffer in self._buffers.items() if buffer.data_ptr() != self._addresses[name]]


class LayerGraph:
    """A captured call of a layer."""

    def __init__(self, trial: Trial, static: Problem) -> None:
        call = _call_of(static, LayerCall)
        self._trial, self._call = trial, replace(call, **{name: getattr(call, name).clone() for name in _OPERANDS})
        capture = partial(CapturedLayer, trial.backend, self._call, static.device)
        self._captured = trial.query("captured: the call", capture)

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with ``problem``, replay, judge."""
        trial, call = self._trial, _call_of(problem, LayerCall)
        expectation = trial.context.expect(problem)
        trial.query(f"{step}: the call", partial(CapturedLayer.load, self._captured, call))
        rows, cache = call.query.shape[0], self._call.image.cache
        for name in _OPERANDS:
            buffer = getattr(self._call, name)
            buffer.copy_(-poison(buffer.shape, buffer.dtype, buffer.device))
            buffer[:rows].copy_(getattr(call, name))
        call.image.reset()
        own, behind = cache[: len(call.image.cache)], cache[len(call.image.cache) :]
        own.copy_(call.image.cache)
        before = behind.clone()
        replay = partial(CapturedLayer.replayed, self._captured, self._call)
        result = trial.call(f"{step}: the call", replay, [cache]).unflatten(-1, (problem.case.heads, -1))
        call.image.cache.copy_(own)
        _judge(trial, problem, expectation, result[:rows], step)
        intact = torch.equal(behind.view(torch.uint8), before.view(torch.uint8))
        trial.require(intact, Check.CACHE, f"{step}: blocks were written that no request of the batch has")
        moved = trial.query(step, partial(CapturedLayer.moved, self._captured), list[str])
        trial.require(not moved, Check.STALE_RESULT, f"{step}: {', '.join(moved)} moved to another address")
        written = result[rows:].ne(0).flatten(1).any(dim=1)
        what = f"{step}: the output is not 0 in {int(written.sum())} rows of padding behind the {rows} of the batch"
        trial.require(not bool(written.any()), Check.MASK, what)

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


def layer_graph(trial: Trial) -> None:
    """Batches of every size up to the captured one; the next larger one is refused, and runs without the graph."""
    case, size = trial.case, len(trial.case.q)
    assert isinstance(case, LayerCase)

    def batch(case: LayerCase, requests: int, seed: int) -> Problem:
        """So many of the requests in an order of its own, most of them shorter, so that no row keeps its length."""
        drawn = Random(case.seed + seed)
        kv = tuple(drawn.choice((length, length // 2, length // 3)) for length in drawn.sample(case.kv, requests))
        return trial.build(replace(case, q=(1,) * requests, kv=kv, decodes=requests, seed=case.seed + seed))

    # Its first sequence, new token included, is as long as a replay's may be.
    longest = replace(case, kv=(_LONGER * (max(case.kv) + 1) - 1, *case.kv[1:]), seed=case.seed + 8)
    graph = LayerGraph(trial, trial.build(replace(case, spare=case.spare + -(-max(longest.kv) // case.page))))
    graph.judge(batch(case, size, 2), "a batch of the captured size, replayed")
    graph.judge(batch(case, size // 2, 3), "half of it, replayed with padding")
    graph.judge(batch(case, size, 7), "another batch of the captured size, replayed after a smaller one")
    graph.judge(batch(case, 1, 4), "a single request, replayed with padding")
    graph.judge(trial.build(longest), "a sequence as long as the graph admits, replayed")
    larger = batch(replace(case, q=(*case.q, 1), kv=(*case.kv, 9), decodes=size + 1), size + 1, 5)
    graph.refuses(larger, "one request more than captured")
    trial.conforms(larger, step="one request more than captured, without the graph")
    graph.judge(batch(case, size, 6), "replayed after a call without the graph")


def sparse_layer_graph(trial: Trial) -> None:
    """Batches of every size up to the captured one, with padding behind them, and one beyond it without the graph."""
    case, size = trial.case, len(trial.case.q)
    assert isinstance(case, SparseLayerCase)
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
        self._static = _call_of(trial.build(replace(trial.case, seed=trial.case.seed + 9)), SparseLayerCall)
        loaded = self._load(_call_of(self.batch(len(trial.case.q), 1), SparseLayerCall))
        made = partial(loaded.run, trial.backend)
        self._captured = trial.query("captured: the call", partial(capture, trial.backend, loaded, made))

    def batch(self, requests: int, seed: int) -> Problem:
        """So many of the requests in an order of their own, some of them shorter, and padding behind them."""
        case, draw = self._trial.case, Random(f"{self._trial.case.id}|{requests}|{seed}")
        kv = tuple(draw.choice((length, length // 2)) for length in draw.sample(case.kv, requests))
        other: dict[str, Any] = {"q": (1,) * requests, "kv": kv, "decodes": requests, "pad": len(case.q) - requests}
        return self._trial.build(replace(case, **other, seed=case.seed + seed))

    def judge(self, problem: Problem, step: str) -> None:
        """Fill the buffers with a batch, replay, and judge what stands in the captured output and in the caches."""
        expectation, call = self._trial.context.expect(problem), _call_of(problem, SparseLayerCall)
        loaded, reached = self._load(call), [image.cache for image in self._static.written.values()]
        replay = partial(replayed, self._captured, self._trial.backend, loaded)
        value = cut(self._trial.call(f"{step}: the call", replay, reached), slice(len(call.q)))
        for name, image in call.written.items():
            own = self._static.written[name].cache
            image.cache.copy_(own[: len(image.cache)])
            intact = torch.equal(own[len(image.cache) :].view(torch.uint8), self._behind[name])
            self._trial.require(intact, Check.WRITTEN, f"{step}: {name} was written where the batch has no block")
        _judge(self._trial, problem, expectation, value, step)

    def _load(self, call: SparseLayerCall) -> SparseLayerCall:
        """The buffers, which now begin with the tensors of a batch; what it says on the host it says itself."""
        theirs = call.owned()
        for name, buffer in self._static.owned().items():
            if not name.endswith("_cpu"):
                buffer[tuple(map(slice, theirs[name].shape))].copy_(theirs[name])
        self._behind = {}
        for name, image in call.written.items():
            image.reset()
            cache, blocks = self._static.written[name].cache, len(image.cache)
            cache[:blocks].copy_(image.cache)
            self._behind[name] = cache[blocks:].view(torch.uint8).clone()
        mine, own = self._static.metadata, call.metadata
        parts = {}
        for name in ("attention", "index"):  # whose buffers and maxima stay, with what is said on the host
            told = {each: value for each, value in vars(getattr(own, name)).items() if each.endswith("_cpu")}
            parts[name] = replace(getattr(mine, name), **told)
        return replace(self._static, metadata=replace(mine, **parts, num_decodes=own.num_decodes))
