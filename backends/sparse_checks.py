"""What a sparse backend of ours checks before it launches: the refusals of SPEC 3.8 and 7.11, with expected and got."""

import torch
from torch import Tensor

from mla_conformance.backends.kernel import AttentionKernel, expect
from mla_conformance.backends.operands import require_forms
from mla_conformance.backends.sparse import MLASparseBackend, MLASparseMetadata
from mla_conformance.reference.cache_layout import CACHE_LAYOUTS, cache_dtype, entry_width
from mla_conformance.reference.entry_formats import TILED_FORMATS
from mla_conformance.reference.selected import NO_KEY


def check_operands(backend: MLASparseBackend, metadata: MLASparseMetadata, q: Tensor, attn_sink: Tensor | None) -> None:
    """Refuse queries and sinks that do not fit the metadata; reads no device memory."""
    heads, width = backend.num_heads, backend.kv_lora_rank + backend.qk_rope_head_dim
    tokens = int(metadata.query_lens_cpu.sum())
    if q.shape != (tokens, heads, width):
        raise ValueError(f"q: expected {tokens} tokens of [{heads}, {width}] by the metadata, got {list(q.shape)}")
    require_forms(MLASparseBackend.run_sparse_decode, {"attn_sink": attn_sink}, {"N": heads})


def check_lists(name: str, indices: Tensor, length: Tensor | None, tokens: int) -> None:
    """Refuse lists and lengths that are not int32, or not one for each query token; reads no device memory."""
    if indices.dtype != torch.int32:
        raise ValueError(f"{name}: expected lists of torch.int32, got {indices.dtype}; convert them")
    if indices.dim() != 2 or indices.shape[0] != tokens:
        raise ValueError(f"{name}: expected a list for each of {tokens} query tokens, got shape {list(indices.shape)}")
    if length is not None:
        expect("topk_length", length, (tokens,), torch.int32, f"the length of each list of {name}")


def check_selection(name: str, indices: Tensor, length: Tensor | None, limit: Tensor) -> None:
    """Refuse lengths beyond the list and numbers that name nothing; reads the lists.

    Args:
        name: how messages call the lists.
        indices: [T, K] int32.
        length: [T] int32, or None.
        limit: [1, 1] or [T, 1], on the device; numbers from 0 to below it name a key.
    """
    columns = indices.shape[1]
    if length is not None:
        off = (length < 0) | (length > columns)
        if bool(off.any()):
            row = int(off.nonzero()[0])
            got = int(length[row])
            raise ValueError(f"topk_length: expected 0 to {columns}, the columns of {name}, got {got} in row {row}")
    outside = listed(indices, length) & ((indices < NO_KEY) | (indices >= limit))
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        most = int(limit.expand(len(indices), 1)[row]) - 1
        got = int(indices[row, column])
        raise ValueError(f"{name}: expected 0 to {most}, or -1, got {got} in row {row}, column {column}")


def listed(indices: Tensor, length: Tensor | None) -> Tensor:
    """[T, K] bool: what of the lists counts and names a key."""
    named = indices != NO_KEY
    if length is None:
        return named
    return named & (torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1))


def packed(numbers: Tensor, named: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] int32: the numbers at ``named`` [T, K] in their order, -1 behind them; [T] int32: how many they are."""
    order = named.sort(dim=1, descending=True, stable=True).indices
    return numbers.masked_fill(~named, NO_KEY).gather(1, order), named.sum(dim=1, dtype=torch.int32)


def names_twice(indices: Tensor, length: Tensor | None) -> bool:
    """Whether a list names a key more than once; reads the lists."""
    ordered = indices.masked_fill(~listed(indices, length), NO_KEY).sort(dim=1).values
    return bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_KEY)).any())


def check_cache(name: str, cache: Tensor, layout: str, backend: AttentionKernel, dtype: torch.dtype) -> None:
    """Refuse a cache of another form than the layout's; reads no device memory."""
    dims = (backend.kv_lora_rank, backend.qk_rope_head_dim)
    width, stored = entry_width(layout, *dims), cache_dtype(layout, dtype)
    if cache.dim() == 3 and cache.shape[2] == width and cache.dtype == stored:
        return
    fitting = [name for name in CACHE_LAYOUTS if name not in TILED_FORMATS or dims in TILED_FORMATS[name].dims]
    others = [name for name in fitting if cache.dim() and entry_width(name, *dims) == cache.shape[-1]]
    hint = f"which is as wide as {' or '.join(others)}" if others else "which is as wide as no layout of such keys"
    raise ValueError(
        f"{name}: expected [blocks, page, {width}] of {stored} for {layout}, got {list(cache.shape)} of {cache.dtype}, "
        f"{hint}"
    )
