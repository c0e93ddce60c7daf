"""The abstract sparse layer: a whole MLA layer with its indexer, from hidden states to hidden states."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mla_conformance.backends import cache_dtypes, graph_support, kernel, prepare, roles, sparse
from mla_conformance.backends.block_size import MultipleOf
from mla_conformance.backends.operands import Form, require_forms, table
from mla_conformance.reference import cache_layout


@dataclass
class SparseIndexerWeights:
    """Weights of an indexer, matrices [out, in] of the model's dtype, those of the norm float32."""

    wq_b: Tensor  # [heads · D, q_lora_rank]
    wk: Tensor  # [D, hidden]
    k_norm_weight: Tensor  # [D]
    k_norm_bias: Tensor  # [D]
    weights_proj: Tensor  # [heads, hidden]


@dataclass
class SparseLayerWeights:
    """Weights of a layer, matrices [out, in], all of the model's dtype."""

    q_a_proj: Tensor  # [q_lora_rank, hidden]
    q_a_layernorm: Tensor  # [q_lora_rank]
    q_b_proj: Tensor  # [N · (P + R), q_lora_rank]
    kv_a_proj_with_mqa: Tensor  # [L + R, hidden]
    kv_a_layernorm: Tensor  # [L]
    kv_b_proj: Tensor  # [N · (P + V), L]
    o_proj: Tensor  # [hidden, N · V]
    indexer: SparseIndexerWeights | None  # None with ``skip_topk``


@table
@dataclass
class MLASparseLayerMetadata:
    """What a layer may know of the batch: requests that decode stand before those that prefill, padding behind both."""

    attention: sparse.MLASparseMetadata  # of the latent cache; lists count positions
    index: sparse.MLASparseMetadata  # of the index cache, which has blocks and a block table of its own
    slot_mapping: Annotated[Tensor, Form("T", torch.int64)]  # slot of each token in the latent cache; -1 writes nothing
    index_slot_mapping: Annotated[Tensor, Form("T", torch.int64)]  # that in the index cache
    num_decodes: int  # requests that decode


class MLASparseLayerConfig(NamedTuple):
    dtype: torch.dtype  # of the model
    num_heads: int  # N, of this rank where several share the heads
    scale: float  # softmax scale
    qk_nope_head_dim: int  # P
    qk_rope_head_dim: int  # R, columns of queries and keys that are rotated
    v_head_dim: int  # V
    kv_lora_rank: int  # L
    is_neox_style: bool  # whether pairs of the layer's rotation are R/2 columns apart, not neighbours
    rms_norm_eps: float  # of the norms of both latents
    preparation: prepare.IndexPreparation  # conventions of the indexer, D among them
    index_n_heads: int  # its heads
    topk_tokens: int  # K, tokens that are selected for each query token
    skip_topk: bool  # whether the layer has no indexer, and reuses the selection of an earlier one
    kv_cache_dtype: str  # layout of the latent cache
    tile_scales: str  # of its ``fp8_ds_mla`` entries
    index_kv_cache_dtype: str  # layout of the index cache
    block_size: int  # tokens of a page of either
    tp_size: int = 1  # ranks that share the heads; what has no heads of theirs, as the indexer, each of them has whole
    tp_rank: int = 0  # which of them this is


class MLASparseLayerBackend(kernel.PagedKernel):
    """A layer with selected keys. Symbols: T tokens, N heads, K tokens that are selected for each."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]  # layouts of the latent cache
    supported_tile_scales: ClassVar[list[str]] = ["float32", "pow2"]  # what it writes as scales of ``fp8_ds_mla``
    supported_index_kv_cache_dtypes: ClassVar[list[str]] = ["fp8_index"]  # layouts of the index cache
    supported_topk: ClassVar[list[int | MultipleOf]] = [MultipleOf(1)]  # numbers of tokens that are selected
    supports_skip_topk: ClassVar[bool] = True  # whether it runs without an indexer of its own
    cudagraph_support: ClassVar[graph_support.AttentionCGSupport] = (
        graph_support.AttentionCGSupport.NEVER
    )  # what may be captured in a CUDA graph

    @classmethod
    def _reasons(cls, config: MLASparseLayerConfig) -> Iterator[str]:
        if config.kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            yield f"kv_cache_dtype {config.kv_cache_dtype} not supported"
        elif config.kv_cache_dtype == "fp8_ds_mla" and config.tile_scales not in cls.supported_tile_scales:
            yield f"{config.tile_scales} scales not supported (writes {', '.join(cls.supported_tile_scales)})"
        if reason := cache_dtypes.contradiction(config.kv_cache_dtype, config.dtype):
            yield reason
        if config.index_kv_cache_dtype not in cls.supported_index_kv_cache_dtypes:
            yield f"an index cache of {config.index_kv_cache_dtype} not supported"
        if not kernel.accepts_block_size(cls.get_supported_kernel_block_sizes(), config.block_size):
            yield f"block_size {config.block_size} not supported"
        if not kernel.accepts_block_size(cls.supported_topk, config.topk_tokens):
            yield f"topk {config.topk_tokens} not supported"
        if config.skip_topk and not cls.supports_skip_topk:
            yield "the selection of another layer not supported (supports_skip_topk)"

    def __init__(self, config: MLASparseLayerConfig, vllm_config: Any) -> None:
        kernel.expect_one("index_kv_cache_dtype", config.index_kv_cache_dtype, roles.INDEX_LAYOUTS)
        self.config, self.vllm_config = config, vllm_config

    def load_weights(self, weights: SparseLayerWeights) -> None:
        self._weights = weights

    def prepare_metadata(self, sparse_layer_metadata: MLASparseLayerMetadata) -> None:
        self._metadata = sparse_layer_metadata

    @abstractmethod
    @table
    def run_sparse_layer(
        self,
        hidden_states: Annotated[Tensor, Form("T, hidden", "model")],  # rows of padding may hold anything
        positions: Annotated[Tensor, Form("T", torch.int64)],
        # of the layer and of its indexer: for each position the cosines of the R/2 pairs, then the sines
        cos_sin_cache: Annotated[Tensor, Form("P, R", torch.float32)],
        # of latents, as of ``MLASparseBackend``
        kv_cache: Annotated[Tensor, Form("blocks, page, width", "entries", written=True)],
        # of index keys, as of ``MLAIndexerBackend``; None with ``skip_topk``
        index_kv_cache: Annotated[Tensor | None, Form("blocks, page, index width", "index entries", written=True)],
        # positions in the row's request; the selection is left there for later layers, or with ``skip_topk`` stands
        # there and stays
        topk_indices_buffer: Annotated[Tensor, Form("rows, K", torch.int32, written=True)],
    ) -> Tensor:
        """One layer over a batch, whose new entries it writes to both caches first; the buffer has T rows or more.

        Returns [T, hidden] of the model's dtype; on several ranks the part of its heads.
        """


def check_sparse_layer_call(backend: MLASparseLayerBackend, metadata: MLASparseLayerMetadata, x: Any) -> None:
    """Refuse what ``run_sparse_layer`` was given that does not fit, and what is not declared."""
    config, tokens = backend.config, int(metadata.attention.query_lens_cpu.sum())
    if (x.index_kv_cache is None) != config.skip_topk:
        raise ValueError(f"index_kv_cache: expected {'none' if config.skip_topk else 'one'} with {config.skip_topk=}")
    known = {
        "T": tokens,
        "R": config.qk_rope_head_dim,
        "model": config.dtype,
        "width": cache_layout.entry_width(config.kv_cache_dtype, config.kv_lora_rank, config.qk_rope_head_dim),
        "entries": cache_layout.cache_dtype(config.kv_cache_dtype, config.dtype),
        "index width": cache_layout.entry_width(config.index_kv_cache_dtype, config.preparation.head_dim, 0),
        "index entries": cache_layout.cache_dtype(config.index_kv_cache_dtype, config.dtype),
        "rows": max(tokens, len(x.topk_indices_buffer)),
        "K": config.topk_tokens,
    }
    require_forms(MLASparseLayerBackend.run_sparse_layer, vars(x), known)
    require_forms(MLASparseLayerMetadata, vars(metadata), known)
    kernel.require_declared(backend, x.hidden_states.device, config)
