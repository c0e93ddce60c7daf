"""Drives a class of the earlier generation: what its metadata builder did once and per batch, and its calls."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.backends.checks import check_unquantised
from mla_conformance.backends.declaration import Declaration, Deviation
from mla_conformance.backends.foreign import reasons_of
from mla_conformance.backends.generations.adapted import AdaptedPrefillBackend, copied_to, first_columns
from mla_conformance.backends.generations.earlier import MLAPrefillBuilderState, MLAPrefillSelectorConfig
from mla_conformance.backends.interface import MLAPrefillSelectorConfig as OurSelectorConfig
from mla_conformance.backends.layer.layer_config import MLAAttentionSpec
from mla_conformance.backends.metadata import MLACommonPrefillMetadata
from mla_conformance.backends.platform import DeviceCapability
from mla_conformance.backends.quant_key import QuantKey
from mla_conformance.reference.dimensions import PRESETS, MLADimensions

LAYER_NAMES = ("layer",)
_NOMINAL_PAGE = 16
_NO_OUT = Deviation("its interface has no output tensor and no quantised output", "the output is copied to ``out``")


@dataclass
class AttentionMetadata:
    """Metadata of a whole batch that consists of prefills."""

    num_prefills: int
    prefill: Any
    num_decodes: int = 0
    decode: Any = None


class EarlierAdapter(AdaptedPrefillBackend):
    """One instance stands for one layer and its metadata builder, whose state it keeps from batch to batch."""

    @classmethod
    def declared(cls, declaration: Declaration) -> Declaration:
        """The declaration, with what the generation's interface lacks."""
        if not isinstance(declaration, Declaration):
            return declaration
        return replace(declaration, deviations=(*declaration.deviations, _NO_OUT))

    @classmethod
    def supports_mla_dimensions(cls, dimensions: MLADimensions) -> bool:
        """Any, or DeepSeek-R1's."""
        return not cls.wrapped.requires_r1_mla_dimensions or _is_r1(dimensions)

    @classmethod
    def validate_configuration(
        cls, device_capability: DeviceCapability | None, selector_config: OurSelectorConfig
    ) -> list[str]:
        """What the driven class says, asked in its generation's terms."""
        config = MLAPrefillSelectorConfig(selector_config.dtype, _is_r1(selector_config.mla_dimensions))
        return reasons_of(cls.wrapped.validate_configuration(device_capability, config))

    def _start(self) -> Any:
        """Nothing yet: this generation's kernels are made for a device, which the first batch tells."""
        return None

    def supports_quant_output(self, quant_key: QuantKey) -> bool:
        """Never."""
        return False

    def prepare_metadata(self, prefill_metadata: MLACommonPrefillMetadata) -> None:
        """Build the backend's own metadata as a metadata builder did."""
        device = prefill_metadata.query_start_loc.device
        if self._target is None:
            self._begin(device, prefill_metadata.q_data_type or torch.get_default_dtype())
        own = self._translated(prefill_metadata)
        self.wrapped.post_process_prefill_metadata(own, self._state, own.query_start_loc)
        requests = own.query_start_loc.shape[0] - 1
        batch = AttentionMetadata(num_prefills=requests, prefill=own)
        self.wrapped.finalize_attention_metadata(
            batch, self._state, requests, self.num_heads, self._cache_spec, self._dims, self._config.model_config
        )
        self._prefill_metadata = batch.prefill

    def _begin(self, device: torch.device, dtype: torch.dtype) -> None:
        arguments = self._configuration(dtype)
        self._config = arguments["vllm_config"]
        # A prefill kernel reads no cache, so any page will do.
        width = self.kv_lora_rank + self.qk_rope_head_dim
        self._cache_spec = MLAAttentionSpec(block_size=_NOMINAL_PAGE, head_size=width)
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self._dims = SimpleNamespace(**{name: arguments[name] for name in sizes})
        self._state: MLAPrefillBuilderState = self.wrapped.create_builder_state(
            self._config, self._cache_spec, list(LAYER_NAMES), device
        )
        self._target = self.wrapped.get_prefill_impl_cls()(**arguments, device=device)

    def _translated(self, metadata: MLACommonPrefillMetadata) -> Any:
        """The same fields in the backend's own classes, which may lack some of ours and have more."""
        values = _fields(metadata)
        if metadata.chunked_context is not None:
            chunked = self.wrapped.get_chunked_context_metadata_cls()
            values["chunked_context"] = _made(chunked, _fields(metadata.chunked_context))
        return _made(self.wrapped.get_prefill_metadata_cls(), values)

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Hand the call on with the metadata; the output is copied to ``out``."""
        check_unquantised(self, output_scale)
        result = self._unpadded(
            self._target.run_prefill_new_tokens(self._prefill_metadata, q, k, v, return_softmax_lse)
        )
        return result if out is None else copied_to(out, result)

    def run_prefill_context_chunk(
        self, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the call on with the metadata."""
        result = self._target.run_prefill_context_chunk(self._prefill_metadata, chunk_idx, q, k, v)
        return self._unpadded(result)

    def _unpadded(self, result: Any) -> Any:
        return first_columns(result, self.v_head_dim) if self._target.requires_v_padding else result


def _is_r1(dimensions: MLADimensions) -> bool:
    return dimensions == PRESETS["r1"].head


def _fields(metadata: Any) -> dict[str, Any]:
    return {field.name: getattr(metadata, field.name) for field in fields(metadata)}


def _made(cls: Any, values: dict[str, Any]) -> Any:
    known = {field.name for field in fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})
