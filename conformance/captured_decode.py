"""From a real decode call to the case that describes it: lengths, pages, layout of the cache, ranks."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from mla_conformance.captured import dims_of, dtype_of, inflation
from mla_conformance.cases.case import Call, Case, Layout


def case_of_decode(backend: Any, metadata: Any, arguments: Mapping[str, Any], values: bool) -> Case:
    """The case of one decode call; on several ranks that of all of them, which share it.

    Args:
        backend: the instance; its head dims, scale and layout of the cache are read.
        metadata: what was prepared for the call.
        arguments: the call's arguments by name.
        values: whether to read the scale of the cache.

    Raises:
        CaseError: no case describes the call.
        ValueError: a request without tokens stands before others, which no case has.
        KeyError: the query has a dtype that cases do not know.
    """
    query, cache = arguments["ql_nope"], arguments["kv_cache"]
    q, totals = _lengths(metadata)
    scale = {"kscale": max(1, round(arguments["k_scale"].item() * 1e6))} if values else {}
    dims = backend.qk_nope_head_dim + backend.qk_rope_head_dim
    return Case.of(
        capability=Call.DECODE.value,
        dtype=dtype_of(query),
        dims=dims_of(backend),
        heads=query.shape[1],
        q=q,
        kv=tuple(total - new for total, new in zip(totals, q, strict=True)),
        page=cache.shape[1],
        scale=round(100 * backend.scale * math.sqrt(dims)),
        layout=_layout(query, arguments["q_pe"]),
        pad=len(metadata.query_lens_cpu) - len(q),
        inflate=inflation(metadata.max_seq_len, tuple(metadata.seq_lens_cpu.tolist())),
        cache=backend.kv_cache_dtype,
        layers=max(1, cache.stride(0) // (cache.shape[1] * cache.stride(1))),
        ranks=metadata.dcp_world_size,
        interleave=metadata.cp_kv_cache_interleave_size,
        **scale,
    )


def _lengths(metadata: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """New tokens and all tokens of each request, those of padding left out."""
    whole = metadata.seq_lens_cpu if metadata.dcp_tot_seq_lens is None else metadata.dcp_tot_seq_lens
    q, totals = tuple(metadata.query_lens_cpu.tolist()), tuple(whole.tolist())
    counted = len(totals) - next((i for i, total in enumerate(reversed(totals)) if total), len(totals))
    if any(total < new for new, total in zip(q[:counted], totals, strict=False)):
        raise ValueError(f"expected sequences of at least the new tokens {list(q)}, padding last, got {list(totals)}")
    return q[:counted], totals[:counted]


def _layout(ql_nope: torch.Tensor, q_pe: torch.Tensor) -> str:
    """The layout of the suite that the strides resemble most."""
    if ql_nope.stride(1) % 2:
        return Layout.ODD.value
    if ql_nope.transpose(0, 1).is_contiguous():
        return (Layout.HEADS_FIRST if q_pe.transpose(0, 1).is_contiguous() else Layout.KV_B_PROJ).value
    return (Layout.PACKED if ql_nope.is_contiguous() else Layout.SLICED).value
