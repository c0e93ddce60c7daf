"""What a case asks of a backend, in the form that backends are validated against."""

import torch

from mla_conformance.backends.decode import MLADecodeSelectorConfig
from mla_conformance.backends.indexer import MLAIndexerSelectorConfig
from mla_conformance.backends.interface import MLAPrefillSelectorConfig
from mla_conformance.backends.sparse import MLASparseSelectorConfig
from mla_conformance.cases.cached import CachedCase
from mla_conformance.cases.case import Call, Case
from mla_conformance.cases.indexer import IndexerCase
from mla_conformance.cases.sparse import SparseCase


def prefill_config(case: Case, dtype: torch.dtype) -> MLAPrefillSelectorConfig:
    """For the prefills of a case."""
    return MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=case.dimensions)


def decode_config(case: CachedCase, dtype: torch.dtype) -> MLADecodeSelectorConfig:
    """For the decodes of a case, which are all of its requests or some of a layer's batch."""
    queries = case.decode_queries
    return MLADecodeSelectorConfig(
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        max_query_len=max(queries),
        uniform=len(set(queries)) == 1,
        dcp_world_size=case.ranks,
        tile_scales=case.scales,
    )


def sparse_config(case: SparseCase, dtype: torch.dtype) -> MLASparseSelectorConfig:
    """For a case of a sparse backend."""
    return MLASparseSelectorConfig(
        call="decode" if case.is_paged else "prefill",
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page if case.is_paged else 1,
        kv_lora_rank=case.kv_lora_rank,
        qk_rope_head_dim=case.dimensions.qk_rope_head_dim,
        num_heads=case.heads,
        topk=case.topk,
        index_space=case.space,
        topk_length=case.length,
        sink=case.sink != "none",
        duplicates=case.repeats,
        lse=case.lse,
        extra_kv_cache_dtype=case.extra if case.has_extra else None,
        extra_block_size=case.extra_page if case.has_extra else 0,
        extra_topk=case.extra_topk if case.has_extra else 0,
        dcp_world_size=case.ranks,
        tile_scales=case.scales,
    )


def indexer_config(case: IndexerCase, dtype: torch.dtype) -> MLAIndexerSelectorConfig:
    """For a case of an indexer."""
    return MLAIndexerSelectorConfig(
        call="logits" if case.call == Call.INDEX_LOGITS else "topk",
        paged=case.is_paged,
        dtype=dtype,
        kv_cache_dtype=case.cache,
        block_size=case.page if case.is_paged else 1,
        num_heads=case.heads,
        head_dim=case.head_dim,
        topk_tokens=case.topk,
        index_space=case.space,
    )
