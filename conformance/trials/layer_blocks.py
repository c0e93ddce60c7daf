"""What a layer's backend says of its cache, and its copies of blocks, compared with the reference byte by byte."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from mla_conformance.judging.verdict import Check
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.reference.cache_layout import copy_blocks, swap_blocks
from mla_conformance.roles.layer.call import LayerCall
from mla_conformance.roles.layer.driver import Layer
from mla_conformance.trials.trial import Trial

_OTHER_LAYERS = 2


def shapes_cache(trial: Trial) -> None:
    """``get_kv_cache_shape`` names the entries that the layout has."""
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    case = call.image.case
    blocks, page, width = call.image.cache.shape
    head_size = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    question = partial(_cache_shape, trial.backend, (blocks, page, 1, head_size), case.cache)
    shape = trial.query("get_kv_cache_shape: the call", question, list[int])
    what = f"get_kv_cache_shape for the layout {case.cache}: expected {[blocks, page, width]}, got {shape}"
    trial.require(shape == [blocks, page, width], Check.CACHE, what)


def moves_blocks(trial: Trial) -> None:
    """``copy_blocks`` and ``swap_blocks`` of the layer's backend leave the bytes that the reference leaves.

    One cache is that of the case, another one has a block more and another stride between its blocks. A source may be
    copied to several blocks, as a shared one is that two requests are about to write.
    """
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    cache = call.image.cache
    call.image.reset()
    # From the first blocks to the last ones, as many as do not meet.
    copies = [(0, len(cache) - 1), (1, len(cache) - 2), (0, len(cache) - 3)]
    pairs = torch.tensor([pair for pair in copies if pair[1] > 1], dtype=torch.int64, device=cache.device).view(-1, 2)
    ours, theirs = _caches(cache), _caches(cache)
    copy_blocks(ours, pairs)
    trial.call("copy_blocks", partial(_copy_blocks, trial.backend, theirs, pairs), theirs)
    _compare(trial, "copy_blocks", ours, theirs)
    for source, target, moved in ((0, 1, pairs + pairs.new_tensor([0, 1])), (1, 0, pairs.flip(1)[:2])):
        swap_blocks(ours[source], ours[target], moved)
        swapped = (theirs[source], theirs[target])
        trial.call("swap_blocks", partial(_swap_blocks, trial.backend, *swapped, moved.cpu()), theirs)
        _compare(trial, "swap_blocks", ours, theirs)


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


def _cache_shape(layer: Layer, sizes: tuple[int, ...], layout: str) -> list[int]:
    return list(layer.backend.get_kv_cache_shape(*sizes, cache_dtype_str=layout))


def _copy_blocks(layer: Layer, caches: list[torch.Tensor], pairs: torch.Tensor) -> None:
    layer.backend.copy_blocks(caches, pairs)


def _swap_blocks(layer: Layer, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    layer.backend.swap_blocks(source, target, pairs)


def _compare(trial: Trial, name: str, expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
    for number, (right, got) in enumerate(zip(expected, found, strict=True)):
        wrong = int((storage_bytes(right) != storage_bytes(got)).sum())
        what = f"{name}: {wrong} bytes of cache {number} of {len(expected)} are not what they must be"
        trial.require(wrong == 0, Check.CACHE, what)


def loads_packed(trial: Trial) -> None:
    """A new layer computes the same from the same weights in codes."""
    step = "with the weights in codes"
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    packed = replace(trial.problem, calls=(replace(call, packed=True),))
    layer = trial.query(f"{step}: the constructor", partial(trial.subject.create, trial.case))
    expectation = trial.context.expect(packed)
    trial.judged(packed, expectation, trial.run(layer, packed), step)
