"""How golden attention is cut into blocks, so that its workspace stays bounded whatever the context's length."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest

import torch

LANES = 2
"""Works on a GPU at a time: while one is in its matrix products, another one moves memory, or begins."""
_END = object()

_GPU_BYTES = 3_040_000_000
_CPU_BYTES = 48_000_000
_SHARE_OF_FREE = 0.5


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks.

    Attributes:
        heads: heads in a batch of matrix products.
        panel: queries whose sums are taken together, a multiple of ``queries``.
        queries: queries in a block, ``step`` times a power of two.
        step: queries in the smallest block, half of which may be hidden.
        keys: keys in a block.
        span: keys that are widened to float64 at a time, a multiple of ``keys``.
    """

    heads: int
    panel: int
    queries: int
    step: int
    keys: int
    span: int


def plan_blocks(device: torch.device, *, heads: int, key_bytes: int, pair_bytes: int) -> Blocks:
    """Blocks that fit the workspace.

    key_bytes: of a widened key of one head. pair_bytes: of a row's score against it, and of the products made of it.

    Tall blocks have few products that wait for one another, small ones leave a GPU idle and a CPU in its dispatcher.
    """
    gpu = device.type == "cuda"
    lane = _workspace(device) // (LANES if gpu else 1)
    group, rows, step = (min(heads, 8), 2048, 256) if gpu else (min(heads, 4), 128, 32)
    width = _rounded(int(0.625 * lane) // (pair_bytes * group * rows), 512, 2 * rows)
    # A row and its sums take half as much again as a key. A triangle has as many keys as rows, and when its keys are
    # there those of a span no longer are.
    panel = _rounded(int(0.375 * lane) // (group * key_bytes * 5 // 2), rows, 4 * rows)
    span = _rounded(int(0.15 * lane) // (group * key_bytes), width)
    return Blocks(heads=group, panel=panel, queries=rows, step=step, keys=width, span=span)


def cuts(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of ``step`` from ``start`` to ``stop``; the last may be shorter."""
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _workspace(device: torch.device) -> int:
    """Bytes that all temporaries may take together."""
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    if _SHARE_OF_FREE * free < _GPU_BYTES:  # asked only then, since the allocator takes a while to answer
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_GPU_BYTES, int(_SHARE_OF_FREE * free))


def _rounded(number: int, multiple: int, most: int = 2**30) -> int:
    """``number`` rounded down to a multiple, at least one of it and ``most`` at most."""
    return min(most, max(multiple, number // multiple * multiple))


def in_lanes(device: torch.device, works: Sequence[Iterator[object]]) -> None:
    """Run every work to its end, step by step; on a GPU several at a time, each on a stream."""
    if device.type != "cuda":
        deque(chain.from_iterable(works), maxlen=0)
        return
    main, streams = torch.cuda.current_stream(device), _streams(device)
    for stream in streams:
        stream.wait_stream(main)
    lanes = (_on(stream, chain.from_iterable(works[lane::LANES])) for lane, stream in enumerate(streams))
    for step in zip_longest(*lanes):
        del step
    for stream in streams:
        main.wait_stream(stream)


def _on(stream: torch.cuda.Stream, steps: Iterator[object]) -> Iterator[None]:
    while True:
        with torch.cuda.stream(stream):
            if next(steps, _END) is _END:
                return
        yield


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]
