"""The base of the adapters: a class of another generation or package, driven as an :class:`MLAPrefillBackend`.

An adapter is a class made for the class it drives, so that what is declared is asked of that class. One from an
installed vLLM, unchanged, expects vLLM's types and an eager engine beside the interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mla_conformance.backends import foreign, interface, kernel, sparse_layer
from mla_conformance.backends.declaration import Declaration
from mla_conformance.backends.interface import QuantKey
from mla_conformance.backends.operands import takes
from mla_conformance.reference.dimensions import MLADimensions

Operands = tuple[Tensor, Tensor, Tensor]  # q, k and v
LAYER_NAME = "layer"
LAYER_MODULE = "vllm.model_executor.layers.attention.mla_attention"
_PREFILLS = "vllm.v1.attention.backends.mla.prefill"
_QUANT_KEYS = "vllm.model_executor.layers.quantization.utils.quant_utils"


def adapter_of(wrapped: Any, adapter: Any, **attributes: Any) -> Any:
    """A subclass of an adapter with these attributes, which goes by the name of the class that it drives."""
    own = {"__module__": wrapped.__module__, "__doc__": wrapped.__doc__, "wrapped": wrapped}
    return type(wrapped.__name__, (adapter,), {**own, "get_name": staticmethod(wrapped.get_name), **attributes})


def _asked(method: str, check: Any, *without: Any) -> Any:
    """A method that asks the driven class, whose answer is checked."""
    return classmethod(lambda cls, *asked: check(getattr(cls.wrapped, method, *without)(*asked), method))


class AdaptedPrefillBackend(interface.MLAPrefillBackend):
    """A class whose methods are this generation's, from a package with types of its own."""

    wrapped: ClassVar[Any]  # the class that is driven

    @classmethod
    def adapt(cls, wrapped: Any) -> type[Self]:
        undeclared = Declaration(distributions=("vllm", "torch") if foreign.is_from_vllm(wrapped) else ())
        declaration = cls.declared(getattr(wrapped, "declaration", None) or undeclared)
        told = {"needed_capability": "", "variant": "", "decode_backend": None}
        attributes = {name: getattr(wrapped, name, without) for name, without in told.items()}
        dtypes = wrapped.supported_dtypes
        adapted: Any = adapter_of(wrapped, cls, supported_dtypes=dtypes, declaration=declaration, **attributes)
        if hasattr(wrapped, "merge_attn_states"):
            adapted.merge_attn_states = lambda self, *given, **named: self._target.merge_attn_states(*given, **named)
        adapted.__abstractmethods__ = frozenset(getattr(wrapped, "__abstractmethods__", ()))
        return adapted

    @classmethod
    def declared(cls, declaration: Declaration) -> Declaration:
        return declaration

    supports_compute_capability = _asked("supports_compute_capability", foreign.yes_or_no)
    supports_dtype = _asked("supports_dtype", lambda answer, _: bool(answer))
    is_available = _asked("is_available", foreign.yes_or_no)
    missing_dependencies = _asked("missing_dependencies", foreign.reasons_of, list)
    broken_dependencies = _asked("broken_dependencies", foreign.reasons_of, list)

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        translated = dimensions_for(cls.wrapped, dimensions)
        if hasattr(cls.wrapped, "supports_mla_dimensions"):
            return bool(cls.wrapped.supports_mla_dimensions(translated))
        return not cls.wrapped.supported_mla_dimensions or translated in cls.wrapped.supported_mla_dimensions

    @classmethod
    def validate_configuration(
        cls, device_capability: kernel.DeviceCapability | None, selector_config: interface.MLAPrefillSelectorConfig
    ) -> list[str]:
        theirs = dimensions_for(cls.wrapped, selector_config.mla_dimensions)
        translated = selector_config._replace(mla_dimensions=theirs)
        return foreign.reasons_of(cls.wrapped.validate_configuration(device_capability, translated))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._target: Any = self._start()

    def _start(self) -> Any:
        return self.wrapped(**self._configuration(torch.bfloat16))  # nominal: no batch is known yet

    def _configuration(self, dtype: torch.dtype) -> dict[str, Any]:
        """Constructor arguments; a minimal configuration stands in for one that the caller does not have."""
        given = self.vllm_config
        config = minimal_vllm_config(self.dimensions, self.num_heads, dtype) if given is None else given
        return self.sizes | {"vllm_config": config}

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        return bool(self._target.supports_quant_output(quant_key_for(self.wrapped, quant_key)))

    def kernel_evidence(self) -> dict[str, str]:
        return dict(getattr(self._target, "kernel_evidence", dict)())

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._target.prepare_metadata(prefill_metadata)

    @takes(interface.MLAPrefillBackend.run_prefill_new_tokens)
    def run_prefill_new_tokens(self, x: Any) -> Tensor | tuple[Tensor, Tensor]:
        return self._new_tokens((x.q, x.k, x.v), x.return_softmax_lse, x.out, x.output_scale)

    def _new_tokens(self, operands: Operands, lse: bool, out: Tensor | None, output_scale: Tensor | None) -> Any:
        given = {name: x for name, x in (("out", out), ("output_scale", output_scale)) if x is not None}
        return self._target.run_prefill_new_tokens(*operands, return_softmax_lse=lse, **given)

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._target.run_prefill_context_chunk(chunk_idx, q, k, v)


def load_layer(layer: Any, joined: Any, weights: sparse_layer.SparseLayerWeights) -> None:
    """Load a whole sparse layer of an engine; ``joined`` is the projection of hidden states to both latents."""
    own = ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")
    loaded = [(getattr(layer, name), getattr(weights, name)) for name in own]
    loaded.append((joined, torch.cat((weights.q_a_proj, weights.kv_a_proj_with_mqa))))
    if (theirs := weights.indexer) is not None:
        indexer = layer.indexer
        loaded += [(indexer.wq_b, theirs.wq_b), (indexer.k_norm, theirs.k_norm_weight)]
        loaded.append((indexer.wk_weights_proj, torch.cat((theirs.wk, theirs.weights_proj))))
        indexer.k_norm.bias.data.copy_(theirs.k_norm_bias)
    for part, weight in loaded:
        part.weight.data.copy_(weight)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What torch makes of no dtype has this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def runs_on(cls: Any, capability: kernel.DeviceCapability | None) -> bool:
    """Whether a class of vLLM's runs on a device; some of them ask for the number of a device that has none."""
    try:
        return bool(cls.supports_compute_capability(capability))
    except AttributeError:
        if capability is None:
            return False
        raise


def first_columns(result: Any, width: int) -> Any:
    """A call's result with the output's first ``width`` columns, as the callers of a padding kernel take them."""
    if isinstance(result, tuple):
        return result[0][..., :width], *result[1:]
    return result[..., :width]


def copied_to(out: Tensor, result: Any) -> Any:
    """A call's result with the output copied to ``out``, as the callers of a kernel without an output tensor do."""
    output = result[0] if isinstance(result, tuple) else result
    if output.shape != out.shape:  # a copy would broadcast it
        raise ValueError(f"expected an output of shape {list(out.shape)}, got {list(output.shape)}")
    out.copy_(output)
    return (out, *result[1:]) if isinstance(result, tuple) else out


def dimensions_for(cls: type, dimensions: MLADimensions) -> Any:
    """Head dims as a class compares them: vLLM's ``MLADimensions``; versions that have none do not compare them."""
    theirs = getattr(import_module(f"{_PREFILLS}.base"), "MLADimensions", None) if foreign.is_from_vllm(cls) else None
    return dimensions if theirs is None else theirs(**asdict(dimensions))


def quant_key_for(cls: type, quant_key: QuantKey) -> Any:
    """vLLM's static per-tensor key, the only one asked for; a vLLM without optional packages has none."""
    try:
        return import_module(_QUANT_KEYS).kFp8StaticTensorSym if foreign.is_from_vllm(cls) else quant_key
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


def prefill_class(dtype: torch.dtype, dimensions: MLADimensions) -> tuple[Any, str]:
    """The prefill backend that vLLM selects for such a model on this machine, or None and why it has none."""
    try:
        return import_module(_PREFILLS).get_mla_prefill_backend(minimal_vllm_config(dimensions, 1, dtype)), ""
    except ValueError as error:
        return None, foreign.one_line(error)


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


def forward_context(config: Any, metadata: dict[str, Any], slots: dict[str, Tensor], captured: bool = False) -> Any:
    """Layers' calls inside of it compute a batch, whose metadata and slots are given by names of layers and caches."""
    context, modes = import_module("vllm.forward_context"), import_module("vllm.config").CUDAGraphMode
    batch = context.ForwardContext(
        no_compile_layers=config.compilation_config.static_forward_context,
        attn_metadata=metadata,
        slot_mapping=slots,
        cudagraph_runtime_mode=modes.FULL if captured else modes.NONE,
    )
    return context.override_forward_context(batch)
