"""Load beside the calls of a kernel: matrix products on other streams of a GPU, or in other threads beside a CPU's."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from random import Random

import torch

_BESIDE = 2
"""Streams, or threads."""
_SIZES = {"cuda": (256, 512, 1024, 2048), "cpu": (64, 128, 256)}
"""Rows of the factors, by turns of chance: each product leaves the kernel other multiprocessors, for another time."""


def load(device: torch.device) -> AbstractContextManager[Callable[[], None]]:
    """What gives every stream or thread a product to compute, if it is told to; at the end all are waited for."""
    return _streams(device) if device.type == "cuda" else _threads()


@contextmanager
def _streams(device: torch.device) -> Iterator[Callable[[], None]]:
    draw, sizes = Random(0), _SIZES["cuda"]
    factor = torch.full((max(sizes), max(sizes)), 0.5, dtype=torch.bfloat16, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(_BESIDE)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))

    def more() -> None:
        for stream in streams:
            size = draw.choice(sizes)
            with torch.cuda.stream(stream):
                torch.mm(factor[:size, :size], factor[:size, :size])

    try:
        yield more
    finally:
        torch.cuda.synchronize(device)


@contextmanager
def _threads() -> Iterator[Callable[[], None]]:
    draw, sizes = Random(0), _SIZES["cpu"]
    factor, pending = torch.full((max(sizes), max(sizes)), 0.5), list[Future[torch.Tensor]]()
    with ThreadPoolExecutor(_BESIDE) as pool:

        def more() -> None:
            pending[:] = [product for product in pending if not product.done()]
            while len(pending) < _BESIDE:
                size = draw.choice(sizes)
                pending.append(pool.submit(torch.mm, factor[:size, :size], factor[:size, :size]))

        yield more
