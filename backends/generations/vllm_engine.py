"""The least of an installed vLLM's engine that a layer of it needs: a configuration, and the context of a batch.

What is not set here is as vLLM's configuration has it by default; nothing is compiled and no graph is captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.backends.foreign import one_line
from mla_conformance.backends.layer.layer_config import LayerConfig
from mla_conformance.reference.dimensions import MLADimensions

LAYER_NAME = "layer"
LAYER_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_PREFILLS = "vllm.v1.attention.backends.mla.prefill"


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Heads on this rank, L, and the head dims."""

    num_heads: int
    kv_lora_rank: int
    dimensions: MLADimensions


def engine_config(config: LayerConfig, sizes: LayerSizes) -> Any:
    """A ``VllmConfig`` for one layer; a stand-in takes the place of the model, which vLLM reads from files.

    Args:
        config: what a driver without vLLM says of batches and cache.
        sizes: of the layer.
    """
    vllm = import_module("vllm.config")
    eager = vllm.CompilationConfig(mode=vllm.CompilationMode.NONE, cudagraph_mode=vllm.CUDAGraphMode.NONE)
    found = vllm.VllmConfig(compilation_config=eager)
    found.model_config = _model(config, sizes)
    found.scheduler_config.max_num_seqs = config.scheduler_config.max_num_seqs
    found.cache_config.block_size = config.cache_config.block_size
    found.cache_config.cache_dtype = config.cache_config.cache_dtype
    drafted = None if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    if drafted:
        found.speculative_config = SimpleNamespace(num_speculative_tokens=drafted, method=None, parallel_drafting=False)
    return found


def prefill_class(dtype: torch.dtype, dimensions: MLADimensions) -> Any:
    """The prefill backend that vLLM selects on this machine.

    Raises:
        ValueError: none can be used.
    """
    text = SimpleNamespace(**asdict(dimensions))
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=text),
        attention_config=SimpleNamespace(mla_prefill_backend=None),
    )
    return import_module(_PREFILLS).get_mla_prefill_backend(config)


def why_no_prefill(dtype: torch.dtype, dimensions: MLADimensions) -> str:
    """Why vLLM has no prefill backend for such a model here; empty if it has one."""
    try:
        prefill_class(dtype, dimensions)
    except ValueError as error:
        return one_line(error)
    return ""


@contextmanager
def current_config(config: Any) -> Iterator[None]:
    """What is made inside of it reads ``config``."""
    with import_module("vllm.config").set_current_vllm_config(config):
        yield


@contextmanager
def forward_context(config: Any, metadata: Any) -> Iterator[None]:
    """The layer's calls inside of it compute the batch of ``metadata``."""
    context = import_module("vllm.forward_context")
    batch = context.ForwardContext(
        no_compile_layers=config.compilation_config.static_forward_context,
        attn_metadata={LAYER_NAME: metadata},
        slot_mapping={LAYER_NAME: metadata.slot_mapping},
    )
    with context.override_forward_context(batch):
        yield


def _model(config: LayerConfig, sizes: LayerSizes) -> SimpleNamespace:
    """What stands for a ``ModelConfig``."""
    heads, width = sizes.num_heads, sizes.kv_lora_rank + sizes.dimensions.qk_rope_head_dim
    text = SimpleNamespace(
        **asdict(sizes.dimensions), kv_lora_rank=sizes.kv_lora_rank, q_lora_rank=None, num_attention_heads=heads
    )
    return SimpleNamespace(
        dtype=config.model_config.dtype,
        max_model_len=config.model_config.max_model_len,
        hf_text_config=text,
        is_diffusion=False,
        get_head_size=lambda: width,
        get_num_attention_heads=lambda parallel_config: heads,
    )
