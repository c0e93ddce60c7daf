"""What a layer's backend says of its cache, and its copies of blocks, compared with the reference byte by byte."""

from collections.abc import Callable

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.judging.verdict import Check
from mla_conformance.problems.layer_call import LayerCall
from mla_conformance.problems.memory import storage_bytes
from mla_conformance.reference.cache_layout import copy_blocks, swap_blocks
from mla_conformance.trials.launch import guarded
from mla_conformance.trials.trial import Trial


def shapes_cache(trial: Trial) -> None:
    """``get_kv_cache_shape`` names the entries that the layout has."""
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    case = call.image.case
    blocks, page, width = call.image.cache.shape
    head_size = case.kv_lora_rank + case.dimensions.qk_rope_head_dim
    shape_of = trial.backend.backend.get_kv_cache_shape
    shape = guarded(
        trial, "get_kv_cache_shape", lambda: shape_of(blocks, page, 1, head_size, cache_dtype_str=case.cache)
    )
    what = f"get_kv_cache_shape for the layout {case.cache}: expected {[blocks, page, width]}, got {list(shape)}"
    trial.require(tuple(shape) == (blocks, page, width), Check.CACHE, what)


def moves_blocks(trial: Trial) -> None:
    """``copy_blocks`` and ``swap_blocks`` of the layer's backend leave the bytes that the reference leaves."""
    call = trial.problem.calls[0]
    assert isinstance(call, LayerCall)
    image = call.image
    blocks = image.cache.shape[0]
    pairs = torch.tensor([[0, blocks - 1], [1, blocks - 2]], device=image.cache.device)
    image.reset()
    ours, theirs = _copy(image.cache), _copy(image.cache)
    copy_blocks([ours], pairs)
    _run(trial, "copy_blocks", lambda: trial.backend.backend.copy_blocks([theirs], pairs))
    _compare(trial, "copy_blocks", ours, theirs)
    target, other = _copy(image.cache), _copy(image.cache)
    swap_blocks(theirs, target, pairs.flip(1))
    _run(trial, "swap_blocks", lambda: trial.backend.backend.swap_blocks(theirs, other, pairs.flip(1).cpu()))
    _compare(trial, "swap_blocks", target, other)


def _copy(cache: torch.Tensor) -> torch.Tensor:
    """A cache with the same bytes and strides in a storage of its own."""
    storage = storage_bytes(cache).clone().untyped_storage()
    empty = torch.empty(0, dtype=cache.dtype, device=cache.device)
    return empty.set_(storage, cache.storage_offset(), cache.shape, cache.stride())


def _run(trial: Trial, name: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        trial.require(False, Check.CALL, f"{name} raised {one_line(error)}")


def _compare(trial: Trial, name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    wrong = int((storage_bytes(expected) != storage_bytes(found)).sum())
    trial.require(wrong == 0, Check.CACHE, f"{name}: {wrong} bytes of the cache are not what they must be")
