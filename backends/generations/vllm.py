"""What a class from an installed vLLM, unchanged, expects beside the interface: vLLM's types and its engine.

vLLM's classes compare head dims and quantisation keys with values of vLLM's own classes, and some read a few entries of
the engine's configuration; a layer needs a configuration and the context of a batch. What is not set here is as vLLM's
configuration has it by default; nothing is compiled and no graph is captured. Nothing here needs vLLM unless such a
class is given.
"""

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.backends.foreign import is_from_vllm, one_line
from mla_conformance.backends.layer.layer_config import LayerConfig
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.backends.sparse_layer import MLASparseLayerConfig
from mla_conformance.reference.dimensions import MLADimensions

LAYER_NAME = "layer"
LAYER_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_PREFILLS = "vllm.v1.attention.backends.mla.prefill"
_DIMENSIONS = f"{_PREFILLS}.base"
_QUANT_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


def dimensions_for(cls: type, dimensions: MLADimensions) -> Any:
    """Head dims as a class compares them: vLLM's ``MLADimensions``; versions that have none do not compare them."""
    theirs = getattr(import_module(_DIMENSIONS), "MLADimensions", None) if is_from_vllm(cls) else None
    return dimensions if theirs is None else theirs(**asdict(dimensions))


def quant_key_for(cls: type, quant_key: QuantKey) -> Any:
    """The key of a quantised output as a class compares it: vLLM's static per-tensor key, the only one asked for.

    A vLLM without its optional packages cannot import it; its classes then know no key either.
    """
    try:
        return import_module(_QUANT_KEYS).kFp8StaticTensorSym if is_from_vllm(cls) else quant_key
    except ImportError:
        return quant_key


def minimal_vllm_config(dimensions: MLADimensions, num_heads: int, dtype: torch.dtype) -> SimpleNamespace:
    """The entries of an engine's configuration that vLLM's MLA prefill backends read, one rank and no warm-up."""
    text = SimpleNamespace(**asdict(dimensions), num_attention_heads=num_heads)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=text),
        attention_config=SimpleNamespace(mla_prefill_backend=None, trtllm_ragged_backend="trtllm-gen"),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def engine_config(config: LayerConfig, num_heads: int, kv_lora_rank: int, dimensions: MLADimensions) -> Any:
    """A ``VllmConfig`` for one layer of so many heads on this rank, by what a driver without vLLM says of it.

    A stand-in takes the place of the model, which vLLM reads from files.
    """
    vllm = import_module("vllm.config")
    eager = vllm.CompilationConfig(mode=vllm.CompilationMode.NONE, cudagraph_mode=vllm.CUDAGraphMode.NONE)
    found = vllm.VllmConfig(compilation_config=eager)
    found.model_config = SimpleNamespace(
        dtype=config.model_config.dtype,
        max_model_len=config.model_config.max_model_len,
        hf_text_config=SimpleNamespace(
            **asdict(dimensions), kv_lora_rank=kv_lora_rank, q_lora_rank=None, num_attention_heads=num_heads
        ),
        is_diffusion=False,
        get_head_size=lambda: kv_lora_rank + dimensions.qk_rope_head_dim,
        get_num_attention_heads=lambda parallel_config: num_heads,
    )
    found.scheduler_config.max_num_seqs = config.scheduler_config.max_num_seqs
    found.cache_config.block_size = config.cache_config.block_size
    found.cache_config.cache_dtype = config.cache_config.cache_dtype
    drafted = None if config.speculative_config is None else config.speculative_config.num_speculative_tokens
    if drafted:
        found.speculative_config = SimpleNamespace(num_speculative_tokens=drafted, method=None, parallel_drafting=False)
    return found


def prefill_class(dtype: torch.dtype, dimensions: MLADimensions) -> Any:
    """The prefill backend that vLLM selects on this machine; ValueError where none can be used."""
    return import_module(_PREFILLS).get_mla_prefill_backend(minimal_vllm_config(dimensions, 1, dtype))


def why_no_prefill(dtype: torch.dtype, dimensions: MLADimensions) -> str:
    """Why vLLM has no prefill backend for such a model here; empty if it has one."""
    try:
        prefill_class(dtype, dimensions)
    except ValueError as error:
        return one_line(error)
    return ""


def current_config(config: Any) -> Any:
    """What is made inside of it reads ``config``."""
    return import_module("vllm.config").set_current_vllm_config(config)


def sparse_engine_config(
    layer: MLASparseLayerConfig, model: SimpleNamespace, longest: int, tokens: int, requests: int
) -> Any:
    """A ``VllmConfig`` for a layer with selected keys of ``model``, for at most so long sequences."""
    vllm = import_module("vllm.config")
    eager = vllm.CompilationConfig(mode=vllm.CompilationMode.NONE, cudagraph_mode=vllm.CUDAGraphMode.NONE)
    found = vllm.VllmConfig(compilation_config=eager)
    found.model_config = SimpleNamespace(
        dtype=layer.dtype,
        max_model_len=longest,
        hf_config=model,
        hf_text_config=model,
        is_diffusion=False,
        is_moe=False,
        model_arch_config=SimpleNamespace(total_num_attention_heads=layer.num_heads),
        get_head_size=lambda: layer.kv_lora_rank + layer.qk_rope_head_dim,
        get_num_attention_heads=lambda parallel_config: layer.num_heads,
    )
    found.scheduler_config.max_num_seqs, found.scheduler_config.max_num_batched_tokens = requests, tokens
    found.cache_config.block_size, found.cache_config.cache_dtype = layer.block_size, layer.kv_cache_dtype
    found.attention_config.sparse_mla_prefill_workspace_factor = 5  # its default, resolved with a model of its own
    found.kernel_config.enable_jit_warmup = False
    return found


def begin_one_rank(device: torch.device) -> None:
    """The groups of an engine of one rank, and its workspace on a device, which layers expect; once a process."""
    state, workspace = import_module("vllm.distributed.parallel_state"), import_module("vllm.v1.worker.workspace")
    if not state.model_parallel_is_initialized():
        with TemporaryDirectory() as folder:
            state.init_distributed_environment(1, 0, (Path(folder) / "store").as_uri(), 0, "gloo")
            state.initialize_model_parallel()
    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(device)


def forward_context(
    config: Any, metadata: dict[str, Any], slots: dict[str, torch.Tensor], captured: bool = False
) -> Any:
    """Layers' calls inside of it compute a batch, whose metadata and slots are given by names of layers and caches."""
    context, modes = import_module("vllm.forward_context"), import_module("vllm.config").CUDAGraphMode
    batch = context.ForwardContext(
        no_compile_layers=config.compilation_config.static_forward_context,
        attn_metadata=metadata,
        slot_mapping=slots,
        cudagraph_runtime_mode=modes.FULL if captured else modes.NONE,
    )
    return context.override_forward_context(batch)
