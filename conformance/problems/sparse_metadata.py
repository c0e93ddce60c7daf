"""Metadata of a batch whose rows name tokens, or are about to; and those of some of its requests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mla_conformance.backends.index_space import IndexSpace
from mla_conformance.backends.sparse import MLASparseMetadata
from mla_conformance.problems.cached_batch import CachedBatch, int32
from mla_conformance.problems.operands import start_loc
from mla_conformance.problems.paging import Pages


def sparse_metadata(
    batch: CachedBatch[Any], pages: Pages, lengths: Sequence[int], *, paged: bool, space: str, rank: int = 0
) -> MLASparseMetadata:
    """Metadata on one rank; its maxima are inflated as the case says.

    Args:
        batch: gives the case and the query tokens.
        pages: where the keys are.
        lengths: keys of each request on this rank.
        paged: whether they lie in a cache; otherwise ``pages`` tells where those of each request begin.
        space: what lists count.
        rank: which rank.
    """
    case, device, cpu = batch.case, batch.device, torch.device("cpu")
    request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(batch.query_lens))
    return MLASparseMetadata(
        query_start_loc=int32(batch.query_start_loc, device),
        req_id_per_token=request.int().to(device),
        seq_lens=int32(lengths, device),
        block_table=pages.block_table if paged else None,
        workspace_starts=None if paged else pages.block_table,
        index_space=IndexSpace(space),
        max_query_len=max(batch.query_lens) * case.inflate,
        max_seq_len=max(1, *lengths) * case.inflate,
        query_lens_cpu=int32(batch.query_lens, cpu),
        seq_lens_cpu=int32(lengths, cpu),
        dcp_world_size=case.ranks,
        dcp_rank=rank,
        cp_kv_cache_interleave_size=case.interleave,
    )


def regrouped_metadata(metadata: MLASparseMetadata, requests: Sequence[int]) -> MLASparseMetadata:
    """Metadata of some of a batch's requests, in the given order; the maxima stay as they are."""
    rows = list(requests)
    query_lens = metadata.query_lens_cpu[rows]
    per_request = ("seq_lens", "seq_lens_cpu", "block_table", "workspace_starts")
    picked = {name: getattr(metadata, name)[rows] for name in per_request if getattr(metadata, name) is not None}
    return replace(
        metadata,
        **picked,
        query_start_loc=torch.tensor(start_loc(query_lens.tolist())).to(metadata.query_start_loc),
        req_id_per_token=torch.arange(len(rows)).repeat_interleave(query_lens).to(metadata.req_id_per_token),
        query_lens_cpu=query_lens,
    )
