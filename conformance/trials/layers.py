"""What only layers are asked: what their backends say of a cache and do to its blocks, weights in codes, and graphs."""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch

from mla_conformance.judging.record import Check, Status, Verdict
from mla_conformance.problems import calls, memory
from mla_conformance.reference.cache_layout import copy_blocks, swap_blocks
from mla_conformance.roles.layer.call import Layer
from mla_conformance.roles.layer.case import LayerCase
from mla_conformance.trials.graph import captured, observed
from mla_conformance.trials.trial import Trial

_OTHER_LAYERS = 2
_OPERANDS = ("query", "kv_c", "k_pe")
_LONGER, _UNUSED_COLUMNS = 2, 8  # times a case's longest sequence that a replay may have; columns behind its pages


def cache_write(trial: Trial) -> None:
    """A layer's writes; that ``get_kv_cache_shape`` names the entries that the layout has; and copies of blocks.

    ``copy_blocks`` and ``swap_blocks`` leave the bytes that the reference leaves. A source may be copied to several
    blocks, as a shared one is that two requests are about to write.
    """
    trial.conforms()
    image = trial.problem.calls[0].image
    case, cache, shape = image.case, image.cache, [*image.cache.shape]
    sizes = (*shape[:2], 1, case.kv_lora_rank + case.dimensions.qk_rope_head_dim)
    question = partial(_cache_shape, trial.backend, sizes, case.cache)
    told = trial.query("get_kv_cache_shape: the call", question, list[int])
    what = f"get_kv_cache_shape for the layout {case.cache}: expected {shape}, got {told}"
    trial.require(told == shape, Check.CACHE, what)
    image.reset()
    # From the first blocks to the last ones, as many as do not meet.
    copies = [(0, len(cache) - 1), (1, len(cache) - 2), (0, len(cache) - 3)]
    pairs = torch.tensor([pair for pair in copies if pair[1] > 1], dtype=torch.int64, device=cache.device).view(-1, 2)
    ours, theirs = _caches(cache), _caches(cache)

    def compare(name: str) -> None:
        for number, (right, got) in enumerate(zip(ours, theirs, strict=True)):
            wrong = int((memory.storage_bytes(right) != memory.storage_bytes(got)).sum())
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
    storage = memory.storage_bytes(cache).clone().untyped_storage()
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


def weight_absorption(trial: Trial) -> None:
    """Weights as loaded and replaced in place; and a new layer, which computes the same from them in codes."""
    trial.conforms()
    other = trial.build(replace(trial.case, seed=trial.case.seed + 2))
    trial.conforms(other, step="after the weights were replaced in place")
    step = "with the weights in codes"
    call: Any = trial.problem.calls[0]
    packed = replace(trial.problem, calls=(replace(call, packed=True),))
    layer = trial.query(f"{step}: the constructor", partial(trial.subject.create, trial.case))
    trial.judged(packed, trial.context.expect(packed), trial.run(layer, packed), step)


def prefill_decode_agreement(trial: Trial) -> None:
    case: Any = trial.case
    trial.conforms(step="as decodes")
    trial.conforms(trial.build(replace(case, decodes=0)), step="the same tokens as prefills")


class CapturedLayer:
    """What the capture of a layer's call, whose tensors are the buffers, leaves where it was made."""

    def __init__(self, layer: Any, call: Any, device: torch.device) -> None:
        self._layer, size = layer, call.query.shape[0]
        module = layer.attention_layer(call.case)  # made before the capture, since its scales come from the host
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

    def fill_buffers(self) -> None:
        self._layer.state.prepare_graph_input_buffers(self._buffers, self._layer.metadata)

    def replayed(self, batch: calls.KernelCall, call: calls.KernelCall) -> Any:
        """What a replay leaves in the captured output; ``call`` brings what its tensors, the buffers, hold now."""
        batch.prepare(self._layer)
        self.fill_buffers()
        self._layer.impl.prepare(self._metadata)
        self._value.fill_(torch.nan)
        return self._replay()

    def moved(self) -> list[str]:
        return [name for name, buffer in self._buffers.items() if buffer.data_ptr() != self._addresses[name]]


class LayerGraph:
    def __init__(self, trial: Trial, static: calls.Problem) -> None:
        call: Any = static.calls[0]
        self._trial, self._call = trial, replace(call, **{name: getattr(call, name).clone() for name in _OPERANDS})
        capture = partial(CapturedLayer, trial.backend, self._call, static.device)
        self._captured = trial.query("captured: the call", capture)

    def judge(self, problem: calls.Problem, step: str) -> None:
        trial, call = self._trial, problem.calls[0]
        expectation = trial.context.expect(problem)
        rows, cache = call.query.shape[0], self._call.image.cache
        for name in _OPERANDS:
            buffer = getattr(self._call, name)
            buffer.copy_(-memory.poison(buffer.shape, buffer.dtype, buffer.device))
            buffer[:rows].copy_(getattr(call, name))
        call.image.reset()
        own, behind = cache[: len(call.image.cache)], cache[len(call.image.cache) :]
        own.copy_(call.image.cache)
        before = behind.clone()
        replay = partial(CapturedLayer.replayed, self._captured, call, self._call)
        result = trial.call(f"{step}: the call", replay, [cache]).unflatten(-1, (problem.case.heads, -1))
        call.image.cache.copy_(own)
        trial.judged(problem, expectation, observed(problem, result[:rows].clone(), call.wrong_writes()), step)
        intact = torch.equal(behind.view(torch.uint8), before.view(torch.uint8))
        trial.require(intact, Check.CACHE, f"{step}: blocks were written that no request of the batch has")
        moved = trial.query(step, partial(CapturedLayer.moved, self._captured), list[str])
        trial.require(not moved, Check.STALE_RESULT, f"{step}: {', '.join(moved)} moved to another address")
        written = result[rows:].ne(0).flatten(1).any(dim=1)
        what = f"{step}: the output is not 0 in {int(written.sum())} rows of padding behind the {rows} of the batch"
        trial.require(not bool(written.any()), Check.MASK, what)

    def refuses(self, problem: calls.Problem, step: str) -> None:
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

    def batch(case: LayerCase, requests: int, seed: int) -> calls.Problem:  # in another order: no row keeps its length
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
