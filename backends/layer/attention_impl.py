"""The part of an attention layer that computes (vLLM's ``AttentionImpl`` and ``MLAAttentionImpl``)."""

from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

import torch

from mla_conformance.backends.layer.attention_types import AttentionLayer, AttentionMetadata, AttentionType
from mla_conformance.backends.layer.context_parallel import ContextParallelGroup, get_dcp_group
from mla_conformance.backends.quant_key import QuantKey

T = TypeVar("T", bound=AttentionMetadata)


class AttentionImpl(ABC, Generic[T]):
    """Attention of one layer; every instance knows its context-parallel ranks before its constructor runs.

    As vLLM reads its process groups, an instance reads :func:`get_dcp_group`.

    Attributes:
        num_heads: query heads on this rank.
        head_size: elements of a head.
        scale: softmax scale.
        can_return_lse_for_decode: whether decode can return the LSE, which merging over ranks needs.
        need_to_return_lse_for_decode: whether it must.
        supports_pcp: whether prefill context parallelism is computed.
        supports_mtp_with_cp_non_trivial_interleave_size: whether several query tokens a request are computed right
            where ranks take turns of more than one token.
        supports_quant_query_input: whether the query may come quantised.
        dcp_group: ranks that share the cached tokens of each sequence.
        dcp_world_size: how many they are.
        dcp_rank: this rank among them.
        pcp_world_size: ranks that share the tokens of a prefill; always 1.
        pcp_rank: this rank among them.
        total_cp_world_size: product of the two.
        total_cp_rank: this rank among all of them.
    """

    num_heads: int
    head_size: int
    scale: float
    can_return_lse_for_decode: bool = False
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False
    need_to_return_lse_for_decode: bool = False
    supports_quant_query_input: bool = False
    dcp_group: ContextParallelGroup
    dcp_world_size: int
    dcp_rank: int
    pcp_world_size: int = 1
    pcp_rank: int = 0
    total_cp_world_size: int
    total_cp_rank: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance of the present group, whatever its constructor does."""
        self = super().__new__(cls)
        self.dcp_group = get_dcp_group()
        self.dcp_world_size, self.dcp_rank = self.dcp_group.world_size, self.dcp_group.rank
        self.total_cp_world_size = self.pcp_world_size * self.dcp_world_size
        self.total_cp_rank = self.pcp_rank * self.dcp_world_size + self.dcp_rank
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode
        return self

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write ``key`` and ``value`` to the cache and attend to it.

        Args:
            layer: holds the scales.
            query: [T, N, head size].
            key: [T, KV heads, head size].
            value: [T, KV heads, head size].
            kv_cache: as ``AttentionBackend.get_kv_cache_shape`` says.
            attn_metadata: of the batch.
            output: to be written.
            output_scale: scale of a quantised output.
            output_block_scale: scales of an output that is quantised in blocks.
        """

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether ``forward`` can write its output quantised by ``quant_key``."""
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare weights, once, for activations of ``act_dtype``."""


class MLAAttentionImpl(AttentionImpl[T], Generic[T]):
    """Attention over latents: L ``kv_lora_rank``, P/R/V the nope, rope and value head dims."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: T,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the latents to the cache and attend to it.

        Args:
            layer: holds the scales.
            hidden_states_or_cq: the query [T, N, P + R], or what an implementation makes its query of.
            kv_c_normed: [T, L].
            k_pe: [T, 1, R], rope applied.
            kv_cache: as ``AttentionBackend.get_kv_cache_shape`` says.
            attn_metadata: of the batch.
            output: to be written.
            output_scale: scale of a quantised output.
            output_block_scale: scales of an output that is quantised in blocks.
        """
