"""The builder of an MLA layer's metadata (vLLM's ``MLACommonMetadataBuilder``), by two routes.

From requests, prefills first, as in vLLM's first generation; from a ``CommonAttentionMetadata``, decodes first, as in
its second. Both routes end in one assembly.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.decode import MLADecodeBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.kernel import UnsupportedConfiguration, accepts_block_size
from mla_conformance.backends.layer.attention_impl import AttentionMetadataBuilder
from mla_conformance.backends.layer.attention_types import CommonAttentionMetadata
from mla_conformance.backends.layer.context_chunks import ContextPlan, plan_context, share_context
from mla_conformance.backends.layer.context_parallel import Sharding, get_dcp_group
from mla_conformance.backends.layer.mla_batch import (
    LayerRequest,
    check_common,
    common_metadata,
    count_decodes,
    layer_fields,
)
from mla_conformance.backends.layer.mla_context import workspace_tokens
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata


class MLACommonMetadataBuilder(AttentionMetadataBuilder[MLACommonMetadata]):
    """Builds metadata for the layers of one cache group.

    Attributes:
        block_size: tokens of a page.
        context_chunk_workspace_size: tokens of the workspace; 0 where no prefill can have context.
        dcp_rank: this rank among ``decode_context_parallel_size``, that of :func:`get_dcp_group`; settable.
        is_profile_run: whether the next batches only measure memory; settable.
    """

    supports_update_block_table = True
    attention_backend: ClassVar[Any] = None  # the backend whose ``get_builder_cls`` returned the class

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = self.page_size = kv_cache_spec.block_size
        self.head_dim = kv_cache_spec.head_size
        self.chunked_prefill_enabled = vllm_config.scheduler_config.chunked_prefill_enabled
        self.enable_prefix_caching = vllm_config.cache_config.enable_prefix_caching
        self.context_chunk_workspace_size = workspace_tokens(vllm_config)
        self.dcp_rank = get_dcp_group().rank
        self.is_profile_run = False
        backend, decode = self.attention_backend, self._decode_backend()
        if backend is not None and not backend.supports_head_size(self.head_dim):
            raise ValueError(
                f"expected a head size of {backend.get_supported_head_sizes()}, got {self.head_dim}; it is L + R"
            )
        sizes = [] if decode is None else decode.get_supported_kernel_block_sizes()
        if self.block_size < 1 or not accepts_block_size(sizes, self.block_size):
            raise ValueError(f"expected a block size of {sizes or 'at least 1'}, got {self.block_size} tokens")
        self._init_reorder_batch_threshold(
            None if decode is None else 1,
            supports_spec_as_decode=decode is not None and decode.supported_query_len != 1,
            supports_dcp_with_varlen=decode is not None and decode.supports_causal_dcp,
        )

    @classmethod
    def _decode_backend(cls) -> type[MLADecodeBackend] | None:
        return None if cls.attention_backend is None else cls.attention_backend.decode_backend

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """That of the decode backend; a batch with prefills is never captured."""
        decode = cls._decode_backend()
        support = cls._cudagraph_support if decode is None else decode.cudagraph_support
        return AttentionCGSupport(min(support.value, AttentionCGSupport.UNIFORM_BATCH.value))

    @cached_property
    def workspace(self) -> Tensor:
        """[workspace tokens, L + R] of the model's dtype, allocated at its first use."""
        shape = (self.context_chunk_workspace_size, self.head_dim)
        return torch.empty(shape, dtype=self.vllm_config.model_config.dtype, device=self.device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLACommonMetadata:
        """The metadata of a batch whose decodes come first; the workspace is the builder's own.

        Args:
            common_prefix_len: without influence.
            common_attn_metadata: the batch.
            fast_build: without influence, nothing here trades one speed for another.

        Raises ValueError: a batch that contradicts itself; UnsupportedConfiguration: attention that is not causal.
        """
        common = common_attn_metadata
        if not common.causal:
            raise UnsupportedConfiguration("an MLA layer attends causally, got causal=False")
        check_common(common, self.block_size, self._sharding())
        decode, query_lens = self._decode_backend(), common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        uniform = decode is not None and not decode.supports_nonuniform_queries
        decodes = count_decodes(query_lens, self.reorder_batch_threshold, uniform)
        metadata = self._assemble(common, common.num_reqs - decodes, prefills_first=False, use_cuda_graph=False)
        if metadata.context_plan is not None:
            metadata.bind_workspace(self.workspace)
        return metadata

    def build_from_requests(self, requests: Sequence[LayerRequest], cuda_graph_pad_size: int = -1) -> MLACommonMetadata:
        """The metadata of a batch whose prefills come first; ``MLACommonState.begin_forward`` binds the workspace.

        Args:
            requests: at least one.
            cuda_graph_pad_size: rows of padding behind them; -1 where no graph is used.

        Raises ValueError: a batch that contradicts itself, prefills behind decodes, or a block table that is too short.
        """
        prompts = [request.is_prompt for request in requests]
        prefills = sum(prompts)
        if not all(prompts[:prefills]):
            late = len(prompts) - 1 - prompts[::-1].index(True)
            raise ValueError(
                f"expected the prefills before the decodes, got a prefill as request {late} of {len(prompts)}, behind "
                "a decode; reorder the batch"
            )
        common = common_metadata(
            requests,
            padding=max(cuda_graph_pad_size, 0),
            block_size=self.block_size,
            device=self.device,
            sharding=self._sharding(),
        )
        return self._assemble(common, prefills, prefills_first=True, use_cuda_graph=cuda_graph_pad_size >= 0)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLACommonMetadata:
        """The metadata of a batch of decodes that a CUDA graph is captured with.

        Raises ValueError: a prefill in the batch.
        """
        metadata = self.build(0, common_attn_metadata)
        if metadata.num_prefills:
            raise ValueError(
                f"a graph is captured with decodes only, of up to {self.reorder_batch_threshold} tokens, got "
                f"{metadata.num_prefills} prefills of up to {metadata.max_query_len}"
            )
        return replace(metadata, use_cuda_graph=True)

    def update_block_table(
        self, metadata: MLACommonMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> MLACommonMetadata:
        """The metadata of the same batch over other pages."""
        return replace(
            metadata,
            block_tables=blk_table[: len(metadata.seq_lens)],
            slot_mapping=slot_mapping[: metadata.slot_mapping.shape[0]],
            _cached_prefill_metadata=None,
            _cached_decode_metadata=None,
        )

    def _sharding(self) -> Sharding:
        parallel = self.vllm_config.parallel_config
        return Sharding(
            parallel.decode_context_parallel_size, self.dcp_rank, getattr(parallel, "cp_kv_cache_interleave_size", 1)
        )

    def _assemble(
        self, common: CommonAttentionMetadata, prefills: int, prefills_first: bool, use_cuda_graph: bool
    ) -> MLACommonMetadata:
        """The metadata of ``common``, its lengths checked."""
        sharding = self._sharding()
        metadata = MLACommonMetadata(
            **layer_fields(common, prefills, prefills_first, sharding),
            dtype=self.vllm_config.model_config.dtype,
            use_cuda_graph=use_cuda_graph,
            head_dim=self.head_dim,
            is_profile_run=self.is_profile_run,
        )
        context_lens = common.host_seq_lens()[: common.num_reqs] - metadata.query_lens_cpu
        plan = metadata.context_plan = self._plan(context_lens[metadata.prefill_requests])
        metadata.context_shares = None if plan is None else share_context(plan, sharding, self.device)
        return metadata

    def _plan(self, context_lens: Tensor) -> ContextPlan | None:
        if not bool((context_lens > 0).any()):
            return None
        if not self.context_chunk_workspace_size:
            raise ValueError(
                f"prefills with up to {int(context_lens.max())} tokens of context need chunked prefill or prefix "
                "caching, got neither; enable one in the configuration"
            )
        return plan_context(
            context_lens,
            workspace_tokens=self.context_chunk_workspace_size,
            page_size=self.page_size,
            device=self.device,
        )
