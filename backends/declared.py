"""What a class declares of its inputs, looked through before anything runs: empty, unknown or contradictory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_conformance.backends.cache import CACHE_CALLS, MLACacheBackend
from mla_conformance.backends.indexer import INDEX_LAYOUTS, MLAIndexerBackend
from mla_conformance.backends.kernel import KernelBackend
from mla_conformance.backends.roles import IndexSpace
from mla_conformance.reference.dimensions import MLADimensions
from mla_conformance.reference.entry_formats import TILE_SCALES, TILED_FORMATS

_CALLS = {MLAIndexerBackend: ("logits", "topk"), MLACacheBackend: CACHE_CALLS, KernelBackend: ("decode", "prefill")}
_CACHES = ("auto", "fp8", *TILED_FORMATS)
_MAY_BE_EMPTY = (
    "supported_mla_dimensions",
    "supported_latent_dims",
    "supported_heads",
    "supported_head_dims",
    "supported_topk",
    "supported_extra_kv_cache_dtypes",
)
"""Lists that mean anything, or nothing further, where they are empty."""


def declared_errors(backend: type) -> Iterator[str]:
    """What is wrong with a kernel's lists, one sentence each; nothing of a class that is not built on our interface."""
    if not issubclass(backend, KernelBackend):
        return
    caches = INDEX_LAYOUTS if issubclass(backend, MLAIndexerBackend) else _CACHES
    calls = next(names for kind, names in _CALLS.items() if issubclass(backend, kind))
    numbers = (_is_positive, "positive numbers")
    # Of each list, what an element is, and how that is said.
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "supported_dtypes": (lambda each: isinstance(each, torch.dtype), "torch dtypes"),
        "supported_slot_dtypes": (lambda each: isinstance(each, torch.dtype), "torch dtypes"),
        "supported_kv_cache_dtypes": _one_of(caches),
        "supported_extra_kv_cache_dtypes": _one_of(caches),
        "supported_tile_scales": _one_of(TILE_SCALES),
        "supported_calls": _one_of(calls),
        "supported_index_spaces": _one_of(tuple(IndexSpace)),
        "supported_heads": numbers,
        "supported_head_dims": numbers,
        "supported_topk": (lambda each: _is_positive(getattr(each, "base", each)), "positive numbers or MultipleOf"),
        "supported_mla_dimensions": (lambda each: isinstance(each, MLADimensions), "MLADimensions"),
        "supported_latent_dims": (_are_latent_dims, "pairs (L, R)"),
    }
    for name, (fits, expected) in checks.items():
        declared = getattr(backend, name, None)
        if declared is None:
            continue
        if not isinstance(declared, list | tuple):
            yield f"{name}: expected a list of {expected}, got {declared!r}"
        elif not declared and name not in _MAY_BE_EMPTY:
            yield f"{name}: expected {expected}, got none, so that nothing is left to judge"
        elif strange := [each for each in declared if not fits(each)]:
            yield f"{name}: expected {expected}, got {strange[0]!r}"
    length = getattr(backend, "supported_query_len", None)
    if not (length is None or _is_positive(length)):
        yield f"supported_query_len: expected a positive number or None, got {length!r}"
    if length == 1 and getattr(backend, "supports_nonuniform_queries", False):
        yield "supports_nonuniform_queries: expected False where supported_query_len is 1, got True"


def _one_of(names: tuple[str, ...]) -> tuple[Callable[[Any], bool], str]:
    return lambda each: each in names, f"some of {', '.join(names)}"


def _are_latent_dims(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and _is_positive(each[0]) and isinstance(each[1], int)


def _is_positive(each: Any) -> bool:
    return isinstance(each, int) and each > 0
