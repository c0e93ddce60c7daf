"""Drives the builder of a vLLM attention backend: a batch in vLLM's terms, decodes first."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch

from mla_conformance.backends.generations.vllm_engine import current_config
from mla_conformance.backends.kernel import UnsupportedConfiguration
from mla_conformance.backends.layer.attention_metadata import CommonAttentionMetadata
from mla_conformance.backends.layer.attention_types import AttentionMetadata
from mla_conformance.backends.layer.mla_requests import LayerRequest, common_metadata
from mla_conformance.backends.layer.mla_sharding import Sharding

_COMMON = "vllm.v1.attention.backend"
_NULL_BLOCK = 0


@dataclass
class AdaptedLayerMetadata(AttentionMetadata):
    """What a builder of vLLM made of a batch.

    Attributes:
        translated: its metadata.
        order: [T] int64, the caller's row of each row of the batch that the builder saw; None if they are the same.
    """

    translated: Any
    order: torch.Tensor | None = None


class AdaptedLayerBuilder:
    """The builder of an attention backend, made when the layer is there that it is for.

    Attributes:
        wrapped: the attention backend that is driven.
    """

    wrapped: ClassVar[Any]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self._page, self._device = kv_cache_spec.block_size, device
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        spec = self.wrapped.customize_spec(impl.module.get_kv_cache_spec(impl.config))
        with current_config(impl.config):
            self._builder = self.wrapped.get_builder_cls()(spec, layer_names, impl.config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AdaptedLayerMetadata:
        """The metadata of a batch whose decodes come first."""
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
            built.order = _rows(requests, order).to(self._device)
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


def _rows(requests: Sequence[LayerRequest], order: Sequence[int]) -> torch.Tensor:
    """[T] the rows of the requests in another order."""
    lengths = [request.query_len for request in requests]
    rows = torch.arange(sum(lengths)).split(lengths)
    return torch.cat([rows[request] for request in order])
