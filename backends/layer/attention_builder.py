"""The part of an attention layer that turns a batch into metadata (vLLM's ``AttentionMetadataBuilder``)."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import torch

from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.layer.attention_metadata import CommonAttentionMetadata

M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builds the metadata of one group of layers, once a batch.

    Attributes:
        reorder_batch_threshold: longest query, in tokens, that counts as decode and is expected at the front of a
            batch; None if the order does not matter.
        supports_update_block_table: whether :meth:`update_block_table` is implemented.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = False

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

    def update_block_table(self, metadata: M, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> M:
        """The metadata of the same batch over other pages.

        Args:
            metadata: what :meth:`build` returned.
            blk_table: [B, max blocks] int32.
            slot_mapping: [T] int64.

        Raises:
            NotImplementedError: ``supports_update_block_table`` is false.
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
