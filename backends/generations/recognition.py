"""Which generation of vLLM's MLA interfaces a class is written in, and the adapter that drives it.

A class is known by what it has, not by what it derives from: one that was written for a vLLM derives from none of ours.
"""

import inspect
from functools import cache
from typing import Any

from mla_conformance.backends.generations.adapted import AdaptedPrefillBackend
from mla_conformance.backends.generations.earlier_adapter import EarlierAdapter
from mla_conformance.backends.generations.layer_adapter import AdaptedLayerBackend
from mla_conformance.backends.generations.present_adapter import PresentAdapter
from mla_conformance.backends.generations.vllm import Dialect, VllmDialect, is_from_vllm


def as_backend(loaded: Any) -> Any:
    """``loaded`` itself if this project's interface fits it, else a class that drives it; the same one each time.

    Args:
        loaded: what a reference named; anything but a class is returned as it is.
    """
    return _adapted(loaded) if isinstance(loaded, type) else loaded


@cache
def _adapted(cls: Any) -> Any:
    if _is_split_layer(cls):
        return AdaptedLayerBackend.adapt(cls)
    dialect = VllmDialect() if is_from_vllm(cls) else Dialect()
    if callable(getattr(cls, "get_prefill_impl_cls", None)):
        return EarlierAdapter.adapt(cls, dialect)
    if _takes_chunk_objects(cls):
        return PresentAdapter.adapt(cls, dialect)
    foreign = is_from_vllm(cls) and callable(getattr(cls, "run_prefill_context_chunk", None))
    return AdaptedPrefillBackend.adapt(cls, dialect) if foreign else cls


def _is_split_layer(cls: Any) -> bool:
    """Whether the computation that a layer's class names is in two parts, which a module around it calls."""
    named = getattr(cls, "get_impl_cls", None)
    return callable(named) and is_from_vllm(cls) and callable(getattr(named(), "forward_mqa", None))


def _takes_chunk_objects(cls: Any) -> bool:
    method = getattr(cls, "run_prefill_context_chunk", None)
    return callable(method) and "chunk" in inspect.signature(method).parameters
