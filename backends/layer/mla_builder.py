"""The builder of an MLA layer's metadata (vLLM's ``MLACommonMetadataBuilder``): of requests, or of a common batch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_conformance.backends.decode import MLADecodeBackend
from mla_conformance.backends.graph_support import AttentionCGSupport
from mla_conformance.backends.kernel import UnsupportedConfiguration, accepts_block_size
from mla_conformance.backends.layer import mla_batch
from mla_conformance.backends.layer.attention_impl import AttentionMetadataBuilder, CommonAttentionMetadata
from mla_conformance.backends.layer.context_parallel import Sharding, get_dcp_group, local_seq_lens
from mla_conformance.backends.layer.mla_batch import LayerRequest, workspace_tokens
from mla_conformance.backends.layer.mla_metadata import MLACommonMetadata, part, share_context
from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks


class MLACommonMetadataBuilder(AttentionMetadataBuilder[MLACommonMetadata]):
    """Builds metadata for the layers of one cache group; ``dcp_rank`` and ``is_profile_run`` are settable."""

    supports_update_block_table = True
    attention_backend: ClassVar[Any] = None  # the backend whose ``get_builder_cls`` returned the class

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = self.page_size = kv_cache_spec.block_size
        self.head_dim = kv_cache_spec.head_size
        self.chunked_prefill_enabled = vllm_config.scheduler_config.chunked_prefill_enabled
        self.enable_prefix_caching = vllm_config.cache_config.enable_prefix_caching
        self.context_chunk_workspace_size = workspace_tokens(vllm_config)  # 0 where no prefill can have context
        self.dcp_rank = get_dcp_group().rank  # among ``decode_context_parallel_size``
        self.is_profile_run = False  # whether the next batches only measure memory
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
        """The metadata of a batch whose decodes come first; neither a prefix nor ``fast_build`` has an influence.

        Refuses contradictory lengths, too few slots, or a block table that is too short.
        """
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        if not common.causal:
            raise UnsupportedConfiguration("an MLA layer attends causally, got causal=False")
        query_lens = common.query_start_loc_cpu[: requests + 1].diff()
        seq_lens = common.host_seq_lens()[:requests]
        if not requests or len(query_lens) != requests or len(seq_lens) != requests:
            raise ValueError(
                f"expected at least one request, with a query and a sequence, got num_reqs {requests}, "
                f"{len(query_lens)} queries and {len(seq_lens)} sequences"
            )
        mla_batch.check_lengths(query_lens, seq_lens)
        tokens, slots = int(query_lens.sum()), common.slot_mapping.shape[0]
        if not tokens <= common.num_actual_tokens <= slots:
            raise ValueError(
                f"expected {tokens} tokens by query_start_loc, no more than num_actual_tokens, and a slot for each of "
                f"these, got num_actual_tokens {common.num_actual_tokens} and {slots} slots"
            )
        rows, columns = common.block_table_tensor.shape
        longest = int(local_seq_lens(seq_lens, self._sharding()).max())
        if rows < requests or columns * self.block_size < longest:
            raise ValueError(
                f"the block table is too short: expected {requests} rows for up to {longest} tokens in blocks of "
                f"{self.block_size}, got {rows} rows of {columns} blocks"
            )
        decode = self._decode_backend()
        uniform = decode is not None and not decode.supports_nonuniform_queries
        decodes = mla_batch.count_decodes(query_lens, self.reorder_batch_threshold, uniform)
        metadata = self._assemble(common, requests - decodes, prefills_first=False, use_cuda_graph=False)
        if metadata.context_plan:
            metadata.bind_workspace(self.workspace)
        return metadata

    def build_from_requests(self, requests: Sequence[LayerRequest], cuda_graph_pad_size: int = -1) -> MLACommonMetadata:
        """The metadata of a batch whose prefills come first; ``MLACommonState.begin_forward`` binds the workspace.

        So many rows of padding stand behind it, -1 where no graph is used.
        """
        prompts = [request.is_prompt for request in requests]
        prefills = sum(prompts)
        if not all(prompts[:prefills]):
            late = len(prompts) - 1 - prompts[::-1].index(True)
            raise ValueError(
                f"expected the prefills before the decodes, got a prefill as request {late} of {len(prompts)}, behind "
                "a decode; reorder the batch"
            )
        form: dict[str, Any] = {"block_size": self.block_size, "device": self.device, "sharding": self._sharding()}
        common = mla_batch.common_metadata(requests, padding=max(cuda_graph_pad_size, 0), **form)
        return self._assemble(common, prefills, prefills_first=True, use_cuda_graph=cuda_graph_pad_size >= 0)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLACommonMetadata:
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
        return replace(
            metadata,
            block_tables=blk_table[: len(metadata.seq_lens)],
            slot_mapping=slot_mapping[: metadata.slot_mapping.shape[0]],
            _cached_prefill_metadata=None,
            _cached_decode_metadata=None,
        )

    def _sharding(self) -> Sharding:
        parallel = self.vllm_config.parallel_config
        interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        return Sharding(parallel.decode_context_parallel_size, self.dcp_rank, interleave)

    def _assemble(
        self, common: CommonAttentionMetadata, prefills: int, prefills_first: bool, use_cuda_graph: bool
    ) -> MLACommonMetadata:
        sharding, requests, decodes = self._sharding(), common.num_reqs, common.num_reqs - prefills
        prefilling, decoding = part(prefills, decodes, prefills_first), part(decodes, prefills, not prefills_first)
        query_lens = common.query_start_loc_cpu[: requests + 1].diff()
        seq_lens, seq_lens_cpu = common.seq_lens[:requests], common.host_seq_lens()[:requests]
        local = local_cpu = None
        if sharding.world_size > 1:
            given = common.dcp_local_seq_lens
            local = (local_seq_lens(common.seq_lens, sharding) if given is None else given)[:requests]
            local_cpu = local_seq_lens(seq_lens_cpu, sharding)
        metadata = MLACommonMetadata(
            num_prefills=prefills,
            num_decodes=decodes,
            num_prefill_tokens=int(query_lens[prefilling].sum()),
            # The rows that pad a graph's batch belong to it, though no request has them.
            num_decode_tokens=int(query_lens[decoding].sum()) if prefills else common.num_actual_tokens,
            prefills_first=prefills_first,
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            seq_lens=seq_lens_cpu.tolist(),
            seq_lens_tensor=seq_lens,
            query_start_loc=common.query_start_loc[: requests + 1],
            query_lens_cpu=query_lens,
            seq_start_loc=torch.nn.functional.pad(seq_lens.cumsum(dim=0, dtype=torch.int32), (1, 0)),
            # A row of padding has more queries than keys.
            context_lens_tensor=common.compute_num_computed_tokens()[:requests].clamp(min=0),
            block_tables=common.block_table_tensor[:requests],
            max_query_len=max(query_lens.tolist(), default=0),
            max_decode_query_len=max(query_lens[decoding].tolist(), default=1),
            max_prefill_seq_len=max(seq_lens_cpu[prefilling].tolist(), default=0),
            max_decode_seq_len=max(seq_lens_cpu[decoding].tolist(), default=0),
            dtype=self.vllm_config.model_config.dtype,
            use_cuda_graph=use_cuda_graph,
            head_dim=self.head_dim,
            is_profile_run=self.is_profile_run,
            dcp_world_size=sharding.world_size,
            dcp_rank=sharding.rank,
            cp_kv_cache_interleave_size=sharding.interleave,
            dcp_local_seq_lens=local,
            dcp_local_seq_lens_cpu=local_cpu,
        )
        metadata.context_plan = plan = self._plan((seq_lens_cpu - query_lens)[prefilling])
        if plan and sharding.world_size > 1:
            metadata.context_shares = share_context(plan, sharding, self.device)
        return metadata

    def _plan(self, context_lens: Tensor) -> Sequence[ContextChunk]:
        if bool((context_lens > 0).any()) and not self.context_chunk_workspace_size:
            raise ValueError(
                f"prefills with up to {int(context_lens.max())} tokens of context need chunked prefill or prefix "
                "caching, got neither; enable one in the configuration"
            )
        sizes = {"workspace_tokens": self.context_chunk_workspace_size, "page_size": self.page_size}
        return plan_context_chunks(context_lens.tolist(), **sizes)
