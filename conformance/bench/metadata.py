"""``bench``: what building an MLA layer's metadata costs, against a plain loop over the requests in the same run."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from mla_conformance.backends.layer.layer_config import (
    CacheConfig,
    LayerConfig,
    MLAAttentionSpec,
    ModelConfig,
    SchedulerConfig,
)
from mla_conformance.backends.layer.mla_builder import MLACommonMetadataBuilder
from mla_conformance.backends.layer.mla_requests import LayerRequest
from mla_conformance.backends.layer.mla_workspace import plan_context
from mla_conformance.reference.chunking import plan_context_chunks

_REPETITIONS = 7
_CONTEXT, _PAGE, _WIDTH = 64 * 1024, 64, 576
_PREFILLS = 64
"""One request in so many prefills 256 new tokens; the others decode."""
_CPU = torch.device("cpu")


def metadata_benchmark(sizes: Sequence[int] = (256, 512, 1024)) -> Iterator[str]:
    """Lines of the table, as they are measured on one thread, for batches of so many requests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for kind in (list, np.array):
            yield from (_metadata_row(size, kind) for size in sizes)
        yield from map(_plan_row, sizes)
    finally:
        torch.set_num_threads(threads)


def _metadata_row(size: int, kind: Callable[[range], Any]) -> str:
    requests, plain, builder = _requests(size, kind), _requests(size, list), _builder(size)
    name = f"metadata of {size} requests with contexts of {_CONTEXT} tokens, block ids as {kind.__name__}"
    workspace = builder.context_chunk_workspace_size
    return _row(name, lambda: builder.build_from_requests(requests), lambda: _loop(plain, workspace), size)


def _plan_row(size: int) -> str:
    workspace, contexts = _builder(size).context_chunk_workspace_size, [_CONTEXT] * size
    pieces = size * len(plan_context_chunks(contexts, workspace_tokens=workspace, page_size=_PAGE))
    lengths, settings = torch.tensor(contexts), {"workspace_tokens": workspace, "page_size": _PAGE}
    name = f"context plan of {size} prefills, {pieces} pieces"
    return _row(
        name, lambda: plan_context(lengths, **settings, device=_CPU), lambda: _plan_loop(contexts, workspace), pieces
    )


def _requests(size: int, kind: Callable[[range], Any]) -> list[LayerRequest]:
    prefills = max(1, size // _PREFILLS)
    lengths = [256] * prefills + [1] * (size - prefills)
    blocks = -(-(_CONTEXT + 256) // _PAGE)
    return [
        LayerRequest(query, _CONTEXT, kind(range(i * blocks, (i + 1) * blocks)), i < prefills)
        for i, query in enumerate(lengths)
    ]


def _builder(size: int) -> MLACommonMetadataBuilder:
    config = LayerConfig(
        model_config=ModelConfig(dtype=torch.bfloat16, max_model_len=2 * _CONTEXT, head_size=_WIDTH),
        scheduler_config=SchedulerConfig(max_num_seqs=size),
        cache_config=CacheConfig(block_size=_PAGE),
    )
    return MLACommonMetadataBuilder(MLAAttentionSpec(block_size=_PAGE, head_size=_WIDTH), ["layer"], config, _CPU)


def _loop(requests: Sequence[LayerRequest], workspace: int) -> tuple[object, ...]:
    """The same tensors, request by request and token by token."""
    slots: list[int] = []
    columns = max(len(request.block_ids) for request in requests)
    tables = []
    for request in requests:
        for token in range(request.context_len, request.context_len + request.query_len):
            slots.append(request.block_ids[token // _PAGE] * _PAGE + token % _PAGE)
        tables.append([*request.block_ids, *[0] * (columns - len(request.block_ids))])
    sequences = [request.context_len + request.query_len for request in requests]
    starts = (list(accumulate(lengths, initial=0)) for lengths in ([r.query_len for r in requests], sequences))
    contexts = [request.context_len for request in requests]
    rows = (*starts, sequences, contexts, tables)
    return (
        torch.tensor(slots),
        *(torch.tensor(row, dtype=torch.int32) for row in rows),
        _plan_loop([request.context_len for request in requests if request.is_prompt], workspace),
    )


def _plan_loop(contexts: Sequence[int], workspace: int) -> tuple[object, ...]:
    chunks = plan_context_chunks(contexts, workspace_tokens=workspace, page_size=_PAGE)
    rows = ([c.key_start_loc for c in chunks], [c.starts for c in chunks], [c.seq_lens for c in chunks])
    totals = [c.num_tokens for c in chunks], [max(c.seq_lens) for c in chunks]
    return (*(torch.tensor(row, dtype=torch.int32) for row in rows), *totals)


def _row(what: str, work: Callable[[], object], loop: Callable[[], object], units: int) -> str:
    seconds, plain = _median(work), _median(loop)
    return (
        f"{what}: {seconds / plain:.3f} × the time of a plain loop ({seconds * 1e3:.2f} ms, {plain * 1e3:.2f} ms), "
        f"{seconds / units * 1e6:.3f} µs each"
    )


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
