"""The part of vLLM's configuration that a layer reads, for whoever drives a layer without vLLM; names as there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: its dtype, the longest sequence in tokens, and L + R."""

    dtype: torch.dtype
    max_model_len: int
    head_size: int

    def get_head_size(self) -> int:
        """Elements of a cached latent, L + R."""
        return self.head_size


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How batches are made: most requests at once, and whether prompts are split."""

    max_num_seqs: int
    chunked_prefill_enabled: bool = True


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The cache: tokens of a page, the name of its layout, and whether prefixes are shared."""

    block_size: int
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Decode context parallelism: ranks, and consecutive tokens that one of them keeps."""

    decode_context_parallel_size: int = 1
    cp_kv_cache_interleave_size: int = 1


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: drafted tokens a step."""

    num_speculative_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """The layers of the model by name, entered by those whose builders look them up."""

    static_forward_context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What stands for a ``VllmConfig``."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)


_current: ContextVar[LayerConfig] = ContextVar("current layer configuration")


@contextmanager
def set_current_config(config: LayerConfig) -> Iterator[None]:
    """Layers that are made inside of it may ask for ``config``, which their constructors do not receive."""
    before = _current.set(config)
    try:
        yield
    finally:
        _current.reset(before)


def get_current_config() -> LayerConfig:
    """The configuration that a layer is made for.

    Raises LookupError: outside of :func:`set_current_config`.
    """
    return _current.get()


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec:
    """The cache of one group of layers: tokens of a page, elements of an entry's latents, name of the layout."""

    block_size: int
    head_size: int
    num_kv_heads: int = 1
    cache_dtype_str: str = "auto"
