"""The parts of an attention layer, names as in vLLM's ``v1.attention.backend``."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, graph_support
from mla_conformance.backends.interface import QuantKey
from mla_conformance.backends.layer.context_parallel import ContextParallelGroup, get_dcp_group


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionMetadata:
    """Base of what a builder tells a layer of a batch."""


class AttentionLayer(Protocol):
    """The layer on whose behalf an ``AttentionImpl`` computes: it holds the scales, float32 scalars and on the host."""

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float
    _prob_scale: Tensor

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor: ...


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Whether the cache holds codes."""
    return cache_dtypes.layout_of(kv_cache_dtype) != "auto"


_BY_REQUEST = (
    *("seq_lens", "block_table_tensor", "encoder_seq_lens", "encoder_seq_lens_cpu", "dcp_local_seq_lens"),
    *("dcp_local_seq_lens_cpu", "_seq_lens_cpu", "_num_computed_tokens_cpu"),
)


@dataclass
class CommonAttentionMetadata:
    """A batch, before a backend's builder makes its own metadata of it; B requests, T tokens."""

    query_start_loc: Tensor  # [B + 1] int32, on the device; where each request's tokens start
    query_start_loc_cpu: Tensor  # the same on the host
    seq_lens: Tensor  # [B] int32, on the device; computed and new tokens of each request
    num_reqs: int  # B; may count padding
    num_actual_tokens: int  # T; may count padding
    max_query_len: int  # longest query in tokens
    max_seq_len: int  # longest sequence in tokens; may exceed the true one
    block_table_tensor: Tensor  # [B, max blocks] int32, on the device
    slot_mapping: Tensor  # [T] int64, on the device; -1 for a token that is not stored
    causal: bool = True  # whether a token attends to no later one
    logits_indices_padded: Tensor | None = None  # for layers that prefill only what the logits need
    num_logits_indices: int | None = None  # how many of these count
    encoder_seq_lens: Tensor | None = None  # [B], for cross attention
    encoder_seq_lens_cpu: Any | None = None  # the same on the host, a numpy array
    dcp_local_seq_lens: Tensor | None = None  # [B] int32, on the device; tokens of each sequence on this rank
    dcp_local_seq_lens_cpu: Tensor | None = None  # the same on the host
    _seq_lens_cpu: Tensor | None = None
    _num_computed_tokens_cpu: Tensor | None = None
    _num_computed_tokens_cache: Tensor | None = None

    @property
    def seq_lens_cpu(self) -> Tensor:
        _warn("seq_lens_cpu", "seq_lens.cpu()")
        return self.host_seq_lens()

    @property
    def num_computed_tokens_cpu(self) -> Tensor:
        _warn("num_computed_tokens_cpu", "query_start_loc_cpu and seq_lens")
        if self._num_computed_tokens_cpu is None:
            self._num_computed_tokens_cpu = self.host_seq_lens() - self.query_start_loc_cpu.diff()
        return self._num_computed_tokens_cpu

    def host_seq_lens(self) -> Tensor:
        """``seq_lens`` on the host, copied from the device if whoever made the batch left none."""
        if self._seq_lens_cpu is None:
            self._seq_lens_cpu = self.seq_lens.cpu()
        return self._seq_lens_cpu

    def compute_num_computed_tokens(self) -> Tensor:
        if self._num_computed_tokens_cache is None:
            self._num_computed_tokens_cache = self.seq_lens - self.query_start_loc.diff()
        return self._num_computed_tokens_cache

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> "CommonAttentionMetadata":
        held = {name: getattr(self, name) for name in _BY_REQUEST}
        rows: dict[str, Any] = {name: x if x is None else x[:num_actual_reqs] for name, x in held.items()}
        return replace(
            self,
            **rows,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            query_start_loc_cpu=self.query_start_loc_cpu[: num_actual_reqs + 1],
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            slot_mapping=self.slot_mapping[:num_actual_tokens],
            _num_computed_tokens_cache=None,
        )


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated: it may wait for the device; use {instead}", DeprecationWarning, stacklevel=3)


M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Builds the metadata of one group of layers, once a batch."""

    _cudagraph_support: ClassVar[graph_support.AttentionCGSupport] = graph_support.AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None  # longest query, in tokens, that is a decode, at the front of a batch
    supports_update_block_table: bool = False  # whether :meth:`update_block_table` is implemented

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> graph_support.AttentionCGSupport:
        return cls._cudagraph_support

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """Set the threshold: with speculative tokens where the kernel takes several, 1 on ranks where it does not."""
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
        """The metadata of a batch; ``fast_build`` is for metadata that is used little."""

    def update_block_table(self, metadata: M, blk_table: Tensor, slot_mapping: Tensor) -> M:
        raise NotImplementedError(f"{type(self).__name__} cannot update a block table; build the metadata anew")

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def use_cascade_attention(self, *batch: Any, **sizes: Any) -> bool:
        return False


T = TypeVar("T", bound=AttentionMetadata)


class AttentionImpl(ABC, Generic[T]):
    """Attention of one layer; every instance knows its context-parallel ranks before its constructor runs."""

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
        self = super().__new__(cls)
        self.dcp_group = get_dcp_group()
        self.dcp_world_size, self.dcp_rank = self.dcp_group.world_size, self.dcp_group.rank
        self.total_cp_world_size = self.pcp_world_size * self.dcp_world_size
        self.total_cp_rank = self.pcp_rank * self.dcp_world_size + self.dcp_rank
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode
        return self

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
        return False

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare weights, once, for activations of ``act_dtype``."""


class MLAAttentionImpl(AttentionImpl[T], Generic[T]):
    """Attention over latents, with the keywords and the operands of ``mla_impl.MLACommonImpl``."""
