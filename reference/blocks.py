"""How golden attention is cut into blocks, so that its workspace stays bounded whatever the context's length."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import cycle, repeat

import torch

LANES = 2
"""Blocks in flight on a GPU: while one is in its matrix products, another one moves memory."""

_GPU_BYTES = 2_700_000_000
_CPU_BYTES = 48_000_000
_SHARE_OF_FREE = 0.5


@dataclass(frozen=True)
class Blocks:
    """Sizes of the blocks.

    Attributes:
        heads: heads in a batch of matrix products.
        queries: queries in a block.
        keys: keys in a block.
        span: keys that are widened to float64 at a time, a multiple of ``keys`` or all of them.
    """

    heads: int
    queries: int
    keys: int
    span: int


def plan_blocks(
    device: torch.device, *, heads: int, queries: int, keys: int, key_bytes: int, pair_bytes: int
) -> Blocks:
    """Blocks for ``queries`` rows against ``keys`` keys.

    key_bytes: of a widened key of one head. pair_bytes: of a row's score against it, and of the products made of it.

    Tall blocks waste products on the diagonal, small ones leave a GPU idle and a CPU in its dispatcher.
    """
    gpu = device.type == "cuda"
    workspace = _workspace(device)
    group = min(heads, 16 if gpu else 4)
    rows = max(1, min(queries, 1024 if gpu else 128))
    elements = int(0.7 * workspace) // (pair_bytes * (LANES if gpu else 1))
    width = _rounded(min(elements // (group * rows), 4096 if gpu else 1024), 512)
    span = _rounded(int(0.3 * workspace) // (group * key_bytes), width)
    return Blocks(heads=group, queries=rows, keys=width, span=min(span, max(1, keys)))


def cuts(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    """Consecutive slices of ``step`` from ``start`` to ``stop``; the last may be shorter."""
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


def _workspace(device: torch.device) -> int:
    """Bytes that all temporaries may take together."""
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_GPU_BYTES, int(_SHARE_OF_FREE * (free + cached)))


def _rounded(number: int, multiple: int) -> int:
    """``number`` rounded down to a multiple, at least one of it."""
    return max(multiple, number // multiple * multiple)


@contextmanager
def lanes(device: torch.device, blocks: int) -> Iterator[Iterator[AbstractContextManager[object]]]:
    """Contexts to run ``blocks`` blocks in: alternating streams of a GPU, joined at the end; nothing on a CPU."""
    if device.type != "cuda" or blocks < LANES:
        yield repeat(nullcontext())
        return
    main, streams = torch.cuda.current_stream(device), _streams(device)
    for stream in streams:
        stream.wait_stream(main)
    yield (torch.cuda.stream(stream) for stream in cycle(streams))
    for stream in streams:
        main.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]
