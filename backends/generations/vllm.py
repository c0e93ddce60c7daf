"""What a class from an installed vLLM, unchanged, expects beside the interface: vLLM's types, and an eager engine."""

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.backends.foreign import is_from_vllm, one_line
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.reference.dimensions import MLADimensions

LAYER_NAME = "layer"
LAYER_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_PREFILLS = "vllm.v1.attention.backends.mla.prefill"
_QUANT_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


def dimensions_for(cls: type, dimensions: MLADimensions) -> Any:
    """Head dims as a class compares them: vLLM's ``MLADimensions``; versions that have none do not compare them."""
    theirs = getattr(import_module(f"{_PREFILLS}.base"), "MLADimensions", None) if is_from_vllm(cls) else None
    return dimensions if theirs is None else theirs(**asdict(dimensions))


def quant_key_for(cls: type, quant_key: QuantKey) -> Any:
    """vLLM's static per-tensor key, the only one asked for; a vLLM without optional packages has none."""
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


def engine_config(page: int, cache_dtype: str, requests: int, head_size: int, heads: int, **model: Any) -> Any:
    """A ``VllmConfig`` for one layer; a stand-in takes the place of the model, which vLLM reads from files."""
    vllm = import_module("vllm.config")
    eager = vllm.CompilationConfig(mode=vllm.CompilationMode.NONE, cudagraph_mode=vllm.CUDAGraphMode.NONE)
    found = vllm.VllmConfig(compilation_config=eager)
    asked = {"get_head_size": lambda: head_size, "get_num_attention_heads": lambda parallel_config: heads}
    found.model_config = SimpleNamespace(is_diffusion=False, **asked, **model)
    found.scheduler_config.max_num_seqs = requests
    found.cache_config.block_size, found.cache_config.cache_dtype = page, cache_dtype
    return found


def drafts(tokens: int | None) -> Any:
    """The part of an engine's configuration by which decodes have so many drafted tokens; None without any."""
    off = {"method": None, "parallel_drafting": False, "enable_adaptive_verification": False}
    return SimpleNamespace(num_speculative_tokens=tokens, **off) if tokens else None


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
