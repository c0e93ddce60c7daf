"""The part of vLLM's configuration that a layer reads, for whoever drives a layer without vLLM; names as there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_conformance.reference.chunking import MAX_WORKSPACE_TOKENS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    dtype: torch.dtype
    max_model_len: int  # longest sequence in tokens
    head_size: int  # L + R

    def get_head_size(self) -> int:
        return self.head_size


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # most requests at once
    chunked_prefill_enabled: bool = True  # whether prompts are split


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int  # tokens of a page
    cache_dtype: str = "auto"  # name of its layout
    enable_prefix_caching: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    decode_context_parallel_size: int = 1  # ranks
    cp_kv_cache_interleave_size: int = 1  # consecutive tokens that one of them keeps


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    num_speculative_tokens: int | None = None  # drafted tokens a step


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    static_forward_context: dict[str, Any] = field(default_factory=dict)  # the layers of the model by name


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
    """The configuration that a layer is made for."""
    return _current.get()


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec:
    block_size: int  # tokens of a page
    head_size: int  # elements of an entry's latents
    num_kv_heads: int = 1
    cache_dtype_str: str = "auto"  # name of the layout


def workspace_tokens(config: Any) -> int:
    """Tokens of the workspace: eight longest sequences or four pages a request; 0 where no prefill can have context."""
    if not (config.scheduler_config.chunked_prefill_enabled or config.cache_config.enable_prefix_caching):
        return 0
    pages = config.scheduler_config.max_num_seqs * config.cache_config.block_size
    tokens: int = min(max(8 * config.model_config.max_model_len, 4 * pages), MAX_WORKSPACE_TOKENS)
    if tokens < pages:
        raise ValueError(
            f"expected a context workspace of at least a page for each request, {config.scheduler_config.max_num_seqs} "
            f"requests x {config.cache_config.block_size} tokens, got {tokens} tokens; lower max_num_seqs"
        )
    return tokens
