"""The earlier generation of vLLM's MLA prefill interface: a factory of classes, and metadata handed to every call."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import foreign, interface, kernel
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.eager import EagerPrefillBackend
from mla_conformance.backends.generations.adapted import AdaptedPrefillBackend, Operands, copied_to, first_columns
from mla_conformance.backends.interface import MLAPrefillSelectorConfig as OurSelectorConfig
from mla_conformance.backends.interface import QuantKey
from mla_conformance.backends.layer.mla_batch import MLAAttentionSpec
from mla_conformance.backends.metadata import ChunkedContextMetadata, MLACommonPrefillMetadata
from mla_conformance.reference.dimensions import PRESETS, MLADimensions

_NO_OUT = Deviation("its interface has no output tensor and no quantised output", "the output is copied to ``out``")


class MLAPrefillSelectorConfig(NamedTuple):
    dtype: torch.dtype
    is_r1_compatible: bool


@dataclass
class MLAPrefillBuilderState:
    """What a backend keeps from one batch's metadata to the next; a backend may derive a class of its own."""

    workspace_buffer: Tensor | None = None  # scratch memory of the kernels
    backend_state: dict[str, Any] = field(default_factory=dict)  # anything else, by name


@dataclass(eq=False, repr=False)
class MLAPrefillImpl(kernel.AttentionSizes, ABC):
    """The kernel of a backend: it keeps its configuration, and gets the metadata in each call."""

    # whether the output is as wide as the queries; the caller then takes the first V columns
    requires_v_padding: ClassVar[bool] = True

    device: torch.device

    @abstractmethod
    def run_prefill_new_tokens(
        self, prefill_metadata: MLACommonPrefillMetadata, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As of :class:`interface.MLAPrefillBackend`, with metadata that the backend finished."""

    @abstractmethod
    def run_prefill_context_chunk(
        self, prefill_metadata: MLACommonPrefillMetadata, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :class:`interface.MLAPrefillBackend`, and for the metadata the new tokens."""


class MLAPrefillBackend(kernel.KernelBackend):
    """What a backend consists of: its kernel's class, its metadata's classes, and the steps that build them."""

    requires_r1_mla_dimensions: ClassVar[bool] = False  # whether the kernel computes DeepSeek-R1's head dims only

    @staticmethod
    @abstractmethod
    def get_prefill_impl_cls() -> type[MLAPrefillImpl]:
        """Class of the kernel."""

    @staticmethod
    def get_prefill_metadata_cls() -> type[MLACommonPrefillMetadata]:
        return MLACommonPrefillMetadata

    @staticmethod
    def get_chunked_context_metadata_cls() -> type:
        return ChunkedContextMetadata

    @classmethod
    def validate_configuration(
        cls, device_capability: kernel.DeviceCapability | None, selector_config: MLAPrefillSelectorConfig
    ) -> list[str]:
        reasons = super().validate_configuration(device_capability, selector_config)
        if cls.requires_r1_mla_dimensions and not selector_config.is_r1_compatible:
            reasons.append(f"MLA dimensions not supported (supported: {PRESETS['r1'].head})")
        return reasons

    @classmethod
    def create_builder_state(
        cls, vllm_config: Any, kv_cache_spec: Any, layer_names: list[str], device: torch.device
    ) -> MLAPrefillBuilderState:
        """What is kept across batches; called once per metadata builder."""
        return MLAPrefillBuilderState()

    @classmethod
    def post_process_prefill_metadata(
        cls, prefill_metadata: MLACommonPrefillMetadata, builder_state: Any, prefill_query_start_loc: Tensor
    ) -> None:
        """Fill the backend's own fields of a batch's prefill metadata; by default there are none."""
        return

    @classmethod
    def finalize_attention_metadata(
        cls,
        attn_metadata: Any,
        builder_state: MLAPrefillBuilderState,
        num_prefills: int,
        num_heads: int,
        kv_cache_spec: Any,
        mla_dims: Any,
        model_config: Any,
    ) -> None:
        """Finish the metadata of the whole batch, whose ``prefill`` is the above; by default nothing is to be done."""
        return


class EarlierAdapter(AdaptedPrefillBackend):
    """One instance stands for one layer and its metadata builder, whose state it keeps from batch to batch."""

    @classmethod
    def declared(cls, declaration: Declaration) -> Declaration:
        known = isinstance(declaration, Declaration)
        return replace(declaration, deviations=(*declaration.deviations, _NO_OUT)) if known else declaration

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        return not cls.wrapped.requires_r1_mla_dimensions or dimensions == PRESETS["r1"].head

    @classmethod
    def validate_configuration(
        cls, device_capability: kernel.DeviceCapability | None, selector_config: OurSelectorConfig
    ) -> list[str]:
        config = MLAPrefillSelectorConfig(selector_config.dtype, selector_config.mla_dimensions == PRESETS["r1"].head)
        return foreign.reasons_of(cls.wrapped.validate_configuration(device_capability, config))

    def _start(self) -> Any:
        """Nothing yet: this generation's kernels are made for a device, which the first batch tells."""
        return None

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        return False

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        device = prefill_metadata.query_start_loc.device
        if self._target is None:
            arguments = self._configuration(prefill_metadata.q_data_type or torch.get_default_dtype())
            self._config = arguments["vllm_config"]
            # A prefill kernel reads no cache, so any page will do.
            width = self.kv_lora_rank + self.qk_rope_head_dim
            self._cache_spec = MLAAttentionSpec(block_size=16, head_size=width)
            sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            self._dims = SimpleNamespace(**{name: arguments[name] for name in sizes})
            layers = (self._config, self._cache_spec, ["layer"])
            self._state: MLAPrefillBuilderState = self.wrapped.create_builder_state(*layers, device)
            self._target = self.wrapped.get_prefill_impl_cls()(**arguments, device=device)
        # The same fields in the backend's own classes, which may lack some of ours and have more.
        context = prefill_metadata.chunked_context
        if context is not None:
            context = _retold(context, self.wrapped.get_chunked_context_metadata_cls())
        own = _retold(replace(prefill_metadata, chunked_context=context), self.wrapped.get_prefill_metadata_cls())
        self.wrapped.post_process_prefill_metadata(own, self._state, own.query_start_loc)
        requests = own.query_start_loc.shape[0] - 1
        batch = SimpleNamespace(num_prefills=requests, prefill=own, num_decodes=0, decode=None)
        model = (self.num_heads, self._cache_spec, self._dims, self._config.model_config)
        self.wrapped.finalize_attention_metadata(batch, self._state, requests, *model)
        self._prefill_metadata = batch.prefill

    def _new_tokens(self, operands: Operands, lse: bool, out: Tensor | None, output_scale: Tensor | None) -> Any:
        interface.check_unquantised(self, output_scale)
        result = self._unpadded(self._target.run_prefill_new_tokens(self._prefill_metadata, *operands, lse))
        return result if out is None else copied_to(out, result)

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._unpadded(self._target.run_prefill_context_chunk(self._prefill_metadata, chunk_idx, q, k, v))

    def _unpadded(self, result: Any) -> Any:
        return first_columns(result, self.v_head_dim) if self._target.requires_v_padding else result


def _retold(metadata: Any, cls: Any) -> Any:
    names = {field.name for field in fields(metadata)} & {field.name for field in fields(cls)}
    return cls(**{name: getattr(metadata, name) for name in names})


class EagerPrefillImpl(MLAPrefillImpl):
    requires_v_padding = False
    kernel: ClassVar[type[EagerPrefillBackend]] = EagerPrefillBackend  # what computes

    def __init__(self, *, device: torch.device, **sizes: Any) -> None:
        super().__init__(**sizes, device=device)
        self._kernel = self.kernel(**sizes)

    def run_prefill_new_tokens(self, prefill_metadata: MLACommonPrefillMetadata, *asked: Any, **named: Any) -> Any:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_new_tokens(*asked, **named)

    def run_prefill_context_chunk(self, prefill_metadata: MLACommonPrefillMetadata, *asked: Any, **named: Any) -> Any:
        self._kernel.prepare_metadata(prefill_metadata)
        return self._kernel.run_prefill_context_chunk(*asked, **named)


class EarlierEagerPrefillBackend(kernel.NamedKernel, MLAPrefillBackend):
    name, variant = "EAGER", "earlier"
    supported_dtypes = EagerPrefillBackend.supported_dtypes
    declaration = EagerPrefillBackend.declaration

    @staticmethod
    def get_prefill_impl_cls() -> type[MLAPrefillImpl]:
        return EagerPrefillImpl
