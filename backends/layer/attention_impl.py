"""The two parts of an attention layer: what builds metadata of a batch, and what computes.

They are vLLM's ``AttentionMetadataBuilder``, ``AttentionImpl`` and ``MLAAttentionImpl``.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.layer.attention_types import (
    AttentionLayer,
    AttentionMetadata,
    AttentionType,
    CommonAttentionMetadata,
)
from mla_conformance.backends.layer.context_parallel import ContextParallelGroup, get_dcp_group
from mla_conformance.backends.quant_key import QuantKey

M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builds the metadata of one group of layers, once a batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    # longest query, in tokens, that counts as decode and is expected at the front of a batch; None if the order does
    # not matter
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = False  # whether :meth:`update_block_table` is implemented

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What of a batch may run inside a CUDA graph."""
        return cls._cudagraph_support

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Set the threshold, raised to a token and its speculative ones where the decode kernel takes several.

        Under decode context parallelism it is 1, unless the kernel masks several query tokens on a part of the keys.
        """
        threshold = reorder_batch_threshold
        speculative = self.vllm_config.speculative_config
        tokens = None if speculative is None else speculative.num_speculative_tokens
        if threshold is not None and supports_spec_as_decode and tokens is not None:
            threshold = max(threshold, 1 + tokens)
        if self.vllm_config.parallel_config.decode_context_parallel_size > 1 and not supports_dcp_with_varlen:
            threshold = 1
        self.reorder_batch_threshold = threshold

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """The metadata of a batch.

        Args:
            common_prefix_len: tokens that all sequences begin with, a hint.
            common_attn_metadata: the batch, reordered if the builder asks for it.
            fast_build: whether building fast is worth more than computing fast, for metadata that is used little.
        """

    def update_block_table(self, metadata: M, blk_table: Tensor, slot_mapping: Tensor) -> M:
        """The metadata of the same batch over other pages.

        Args:
            metadata: what :meth:`build` returned.
            blk_table: [B, max blocks] int32.
            slot_mapping: [T] int64.

        Raises NotImplementedError: ``supports_update_block_table`` is false.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot update a block table; build the metadata anew")

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The metadata of a batch that a CUDA graph is captured with."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        """The metadata of a draft model's batch.

        Args:
            common_attn_metadata: the batch.
            draft_index: which token of the drafted chain, or which level of the drafted tree.
        """
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """Whether the common prefix is to be attended to once for all requests."""
        return False


T = TypeVar("T", bound=AttentionMetadata)


class AttentionImpl(ABC, Generic[T]):
    """Attention of one layer; every instance knows its context-parallel ranks before its constructor runs.

    As vLLM reads its process groups, an instance reads :func:`get_dcp_group`.
    """

    num_heads: int  # query heads on this rank
    head_size: int  # elements of a head
    scale: float  # softmax scale
    can_return_lse_for_decode: bool = False  # whether decode can return the LSE, which merging over ranks needs
    supports_pcp: bool = False  # whether prefill context parallelism is computed
    # whether several query tokens a request are computed right where ranks take turns of more than one token
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False
    need_to_return_lse_for_decode: bool = False  # whether it must
    supports_quant_query_input: bool = False  # whether the query may come quantised
    dcp_group: ContextParallelGroup  # ranks that share the cached tokens of each sequence
    dcp_world_size: int  # how many they are
    dcp_rank: int  # this rank among them
    pcp_world_size: int = 1  # ranks that share the tokens of a prefill; always 1
    pcp_rank: int = 0  # this rank among them
    total_cp_world_size: int  # product of the two
    total_cp_rank: int  # this rank among all of them

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
        layer: AttentionLayer,  # holds the scales
        query: Tensor,  # [T, N, head size]
        key: Tensor,  # [T, KV heads, head size]
        value: Tensor,  # [T, KV heads, head size]
        kv_cache: Tensor,  # as ``AttentionBackend.get_kv_cache_shape`` says
        attn_metadata: T,  # of the batch
        output: Tensor | None = None,  # to be written
        output_scale: Tensor | None = None,  # scale of a quantised output
        output_block_scale: Tensor | None = None,  # scales of an output that is quantised in blocks
    ) -> Tensor:
        """Write ``key`` and ``value`` to the cache and attend to it."""

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether ``forward`` can write its output quantised by ``quant_key``."""
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare weights, once, for activations of ``act_dtype``."""


class MLAAttentionImpl(AttentionImpl[T], Generic[T]):
    """Attention over latents: L ``kv_lora_rank``, P/R/V the nope, rope and value head dims.

    It is constructed with the keywords of ``mla_kernels.MLAKernels``.
    """

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: T,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the latents to the cache and attend to it; operands as of ``mla_impl.MLACommonImpl.forward``."""
