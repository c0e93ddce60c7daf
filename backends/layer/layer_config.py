"""The part of vLLM's configuration that a layer reads, for whoever drives a layer without vLLM; names as there."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.reference.chunking import MAX_WORKSPACE_TOKENS


def layer_config(
    *,
    dtype: torch.dtype,  # of the model
    max_model_len: int,  # longest sequence in tokens
    head_size: int,  # L + R
    max_num_seqs: int,  # most requests at once
    block_size: int,  # tokens of a page
    cache_dtype: str = "auto",  # name of its layout
    chunked_prefill_enabled: bool = True,  # whether prompts are split
    enable_prefix_caching: bool = False,
    ranks: int = 1,
    interleave: int = 1,  # consecutive tokens that a rank keeps
    drafted: int | None = None,  # tokens a step
) -> SimpleNamespace:
    """What stands for a ``VllmConfig``."""
    model = {"dtype": dtype, "max_model_len": max_model_len, "head_size": head_size}
    cache = {"block_size": block_size, "cache_dtype": cache_dtype, "enable_prefix_caching": enable_prefix_caching}
    scheduler = {"max_num_seqs": max_num_seqs, "chunked_prefill_enabled": chunked_prefill_enabled}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model, get_head_size=lambda: head_size),
        scheduler_config=SimpleNamespace(**scheduler),
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted),
        compilation_config=SimpleNamespace(static_forward_context={}),  # the layers of the model by name
    )


_current: ContextVar[Any] = ContextVar("current layer configuration")
get_current_config = _current.get


@contextmanager
def set_current_config(config: Any) -> Iterator[None]:
    """Layers that are made inside of it may ask for ``config``, which their constructors do not receive."""
    before = _current.set(config)
    try:
        yield
    finally:
        _current.reset(before)


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
