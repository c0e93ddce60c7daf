"""Drives the builder of a vLLM attention backend, and the module that vLLM puts around it.

The builder is handed a batch in vLLM's terms, decodes first; the module writes the cache, absorbs, and calls the
backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mla_conformance.backends.generations.vllm import (
    LAYER_MODULE,
    LAYER_NAME,
    current_config,
    engine_config,
    forward_context,
    prefill_class,
    why_no_prefill,
)
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.attention_types import AttentionLayer, AttentionMetadata, CommonAttentionMetadata
from mla_conformance.backends.layer.context_parallel import Sharding
from mla_conformance.backends.layer.layer_config import get_current_config
from mla_conformance.backends.layer.mla_batch import LayerRequest, common_metadata
from mla_conformance.backends.layer.mla_kernels import is_dense, stored_weight
from mla_conformance.reference.dimensions import MLADimensions

_COMMON = "vllm.v1.attention.backend"
_NULL_BLOCK = 0


@dataclass
class AdaptedLayerMetadata(AttentionMetadata):
    """What a builder of vLLM made of a batch."""

    translated: Any  # its metadata
    # [T] int64, the caller's row of each row of the batch that the builder saw; None if they are the same
    order: Tensor | None = None


class AdaptedLayerBuilder:
    """The builder of an attention backend, made when the layer is there that it is for."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._page, self._device = kv_cache_spec.block_size, device
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        spec = impl.wrapped.customize_spec(impl.module.get_kv_cache_spec(impl.config))
        with current_config(impl.config):
            self._builder = impl.wrapped.get_builder_cls()(spec, layer_names, impl.config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AdaptedLayerMetadata:
        return AdaptedLayerMetadata(self._builder.build(common_prefix_len, in_vllms_terms(common_attn_metadata)))

    def build_from_requests(
        self, requests: Sequence[LayerRequest], cuda_graph_pad_size: int = -1
    ) -> AdaptedLayerMetadata:
        """The metadata of a batch whose prefills come first: its decodes are moved before them, as an engine does."""
        order = sorted(range(len(requests)), key=lambda request: requests[request].is_prompt)
        if cuda_graph_pad_size > 0 and requests[0].is_prompt:
            raise UnsupportedConfiguration("rows of padding behind prefills not supported")
        common = common_metadata(
            [requests[request] for request in order],
            padding=max(cuda_graph_pad_size, 0),
            block_size=self._page,
            device=self._device,
            sharding=Sharding(),
        )
        built = self.build(0, common)
        if order != list(range(len(requests))):
            lengths = [request.query_len for request in requests]
            rows = torch.arange(sum(lengths)).split(lengths)
            built.order = torch.cat([rows[request] for request in order]).to(self._device)
        return built


def in_vllms_terms(common: CommonAttentionMetadata) -> Any:
    """A batch as vLLM's runner describes it; there, rows of padding have no query and the first block."""
    seq_lens, starts_cpu = common.host_seq_lens(), common.query_start_loc_cpu
    padding = starts_cpu.diff() > seq_lens
    if bool(padding.any()):
        starts_cpu = starts_cpu.clamp(max=int(starts_cpu[int(padding.int().argmax())]))
    table = common.block_table_tensor
    return import_module(_COMMON).CommonAttentionMetadata(
        query_start_loc=starts_cpu.to(common.query_start_loc.device),
        query_start_loc_cpu=starts_cpu,
        seq_lens=common.seq_lens,
        num_reqs=common.num_reqs,
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        block_table_tensor=table.masked_fill(padding.to(table.device)[:, None], _NULL_BLOCK),
        slot_mapping=common.slot_mapping,
        causal=common.causal,
        seq_lens_cpu_upper_bound=seq_lens,
    )


class AdaptedLayerImpl:
    """One ``MLAAttention`` over an attention backend, with the interface of ``MLAAttentionImpl`` as it was before.

    Symbols: T tokens, N heads, L ``kv_lora_rank``, P/R/V the nope, rope and value head dims.

    Attributes:
        wrapped: the attention backend that is driven.
        module: vLLM's layer.
        config: the configuration that it was made with.
    """

    def __init__(
        self,
        wrapped: Any,
        *,
        num_heads: int,
        scale: float,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        **others: Any,
    ) -> None:
        config, self.wrapped = get_current_config(), wrapped
        dims = MLADimensions(
            qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim, v_head_dim=v_head_dim
        )
        self._heads, self._qk_head_dim, self._v_head_dim = num_heads, dims.qk_head_dim, v_head_dim
        self.config = engine_config(config, num_heads, kv_lora_rank, dims)
        dtype = config.model_config.dtype
        with current_config(self.config), stored_weight(kv_b_proj).device:
            prefill = NoPrefill if why_no_prefill(dtype, dims) else prefill_class(dtype, dims)
            self.module = import_module(LAYER_MODULE).MLAAttention(
                num_heads=num_heads,
                scale=scale,
                qk_nope_head_dim=qk_nope_head_dim,
                qk_rope_head_dim=qk_rope_head_dim,
                v_head_dim=v_head_dim,
                q_lora_rank=q_lora_rank,
                kv_lora_rank=kv_lora_rank,
                kv_b_proj=as_vllm_linear(kv_b_proj, kv_lora_rank, dtype),
                cache_config=self.config.cache_config,
                prefix=LAYER_NAME,
                attn_backend=wrapped,
                prefill_backend_cls=prefill,
            )
        config.compilation_config.static_forward_context[LAYER_NAME] = self

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        with current_config(self.config):
            self.module.process_weights_after_loading(act_dtype)

    def forward(
        self,
        layer: AttentionLayer,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: AdaptedLayerMetadata,
    ) -> Tensor:
        """[T, N·V] of vLLM's layer; operands as in :class:`MLACommonImpl`."""
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            getattr(self.module, name).copy_(getattr(layer, name))
        for name in ("_q_scale_float", "_k_scale_float", "_v_scale_float"):
            setattr(self.module, name, getattr(layer, name))
        self.module.bind_kv_cache(kv_cache.unsqueeze(1))
        order = attn_metadata.order
        operands = (q.view(-1, self._heads, self._qk_head_dim), k_c_normed, k_pe)
        given = operands if order is None else tuple(x[order] for x in operands)
        with forward_context(self.config, attn_metadata.translated):
            shape = torch.Size((len(given[0]), self._heads * self._v_head_dim))
            result: Tensor = self.module(*given, output_shape=shape)
        return result if order is None else torch.empty_like(result).index_copy_(0, order, result)

    def kernel_evidence(self) -> dict[str, str]:
        parts = {"layer": self.module, "decode": self.module.impl, "prefill": self.module.prefill_backend}
        return {name: f"{type(part).__module__}.{type(part).__name__}" for name, part in parts.items()}


class NoPrefill:
    """What a layer is made with where vLLM has no prefill backend, so that its decodes can be driven."""

    def __init__(self, **sizes: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "none"

    def clone(self) -> "NoPrefill":
        return self

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Refuse.

        Raises UnsupportedConfiguration: always.
        """
        raise UnsupportedConfiguration("the batch has prefills, and vLLM has no MLA prefill backend here")


def as_vllm_linear(linear: Any, in_features: int, dtype: torch.dtype) -> Any:
    """A linear layer with what vLLM's layers ask of one of their own.

    Args:
        linear: called, it projects; one that says how it is quantised is taken as it is.
        in_features: L.
        dtype: of what it is called with.
    """
    if hasattr(linear, "quant_method"):
        return linear
    own = None if is_dense(stored_weight(linear)) else SimpleNamespace(apply=lambda layer, x, bias: linear(x)[0])
    return _Linear(linear, quant_method=own, input_size_per_partition=in_features, params_dtype=dtype)


class _Linear:
    """A linear layer and more attributes."""

    def __init__(self, linear: Any, **attributes: Any) -> None:
        self._linear = linear
        vars(self).update(attributes)

    def __call__(self, x: Tensor) -> Any:
        return self._linear(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)
