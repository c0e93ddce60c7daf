"""An author's own tensors as a problem of the suite: the golden result, budget and judge of a case, without a case."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from mla_conformance.api import own_forms as forms
from mla_conformance.backends import roles, topk
from mla_conformance.backends.decode import MLACommonDecodeMetadata
from mla_conformance.cases.case import Call
from mla_conformance.files.whole import InputError
from mla_conformance.problems.cached_batch import batch_metadata, list_metadata
from mla_conformance.problems.calls import Problem, longest_lists
from mla_conformance.problems.operands import start_loc
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.indexer.problem import IndexerCall
from mla_conformance.roles.prefill.problem import PrefillCall, assemble_metadata, one_chunk
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.roles.topk.problem import TopKCall


def problem_of(inputs: Mapping[str, Any], lse: bool) -> Problem:
    """The problem that inputs of a role's table are, with or without an LSE to be judged; an InputError of others."""
    role = next((role for name, role in _TOLD_BY.items() if name in inputs), "")
    if not role:
        kinds = "q, k, v (prefill); q, kv_cache (decode); q, topk_indices (sparse); q, weights, k (indexer); or logits"
        raise InputError(f"assert_close: expected the inputs of a kernel, {kinds}, got {', '.join(inputs) or 'none'}")
    make = MAKERS[role]
    try:
        signature(make).bind(lse=lse, **inputs)
    except TypeError as error:
        known = ", ".join(name for name in signature(make).parameters if name != "lse")
        raise InputError(f"assert_close: {error}; the inputs of a {role} are {known}") from error
    problem: Problem = make(lse=lse, **inputs)
    return problem


def prefill(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = True,
    cu_seqlens_q: forms.Starts = None,
    cu_seqlens_k: forms.Starts = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    lse: bool = True,
) -> Problem:
    """Attention of queries to up-projected keys and values, as ``golden.prefill`` has it."""
    forms.require("prefill", {}, q=q, k=k, v=v)
    sizes = {"N": q.shape[1], "P + R": q.shape[2], "S": len(k)}
    shared = {**sizes, "N": 1 if 1 in (k.shape[1], v.shape[1]) else q.shape[1]}
    forms.require("prefill", shared, k=k, v=v)
    queries = forms.starts_of("cu_seqlens_q", cu_seqlens_q, len(q))
    same = cu_seqlens_k is None and len(q) == len(k)
    keys = queries if same else forms.starts_of("cu_seqlens_k", cu_seqlens_k, len(k), len(queries) - 1)
    lengths, seen = forms.lengths_of(queries), forms.lengths_of(keys)
    rope = 64 if q.shape[2] > 64 else 0
    dims = f"{q.shape[2] - rope}-{rope}-{v.shape[2]}-512"
    call = {"call": Call.NEW_TOKENS} if causal else {"call": Call.CONTEXT_CHUNK, "kv": seen}
    case = forms.case_of("lse", scale, q, dims=dims, q=lengths, lse=lse, **call)
    chunks = () if causal else one_chunk(seen)
    only = PrefillCall(
        q=q, k=k, v=v, query_start_loc=queries, key_start_loc=keys, chunk_idx=None if causal else 0, prepares=True,
        case=case, metadata=assemble_metadata(case, lengths, chunks, q.dtype, q.device),
    )  # fmt: skip
    return Problem(case, case.id, q.device, (only,))


def decode(
    *,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int = 512,
    cu_seqlens_q: forms.Starts = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | float = 1.0,
    causal: bool = True,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    lse: bool = True,
) -> Problem:
    """Absorbed queries against a paged cache, as ``golden.decode`` has it."""
    forms.require("decode", {}, q=q)
    if not causal:
        raise InputError("causal: a decode is causal, expected True, got False")
    queries = forms.starts_of("cu_seqlens_q", forms.one_each(cu_seqlens_q, q, seq_lens), len(q), len(seq_lens))
    forms.require("decode", {"B": len(queries) - 1}, seq_lens=seq_lens, block_table=block_table)
    totals, lengths = seq_lens.tolist(), forms.lengths_of(queries)
    slots = forms.slots_of(kv_cache, kv_cache_dtype, q, kv_lora_rank, block_table, totals)
    keys = forms.meaning_of(kv_cache, slots, kv_cache_dtype, k_scale, kv_lora_rank, q)
    case = forms.latent_case("decode", scale, q, kv_lora_rank, lengths, totals, call=Call.DECODE,
                             page=kv_cache.shape[1], cache=kv_cache_dtype, lse=lse)  # fmt: skip
    given = {"ql_nope": q[..., :kv_lora_rank], "q_pe": q[..., kv_lora_rank:], "kv_cache": kv_cache}
    only = DecodeCall(
        q=q,
        k=keys,
        v=keys[..., :kv_lora_rank],
        query_start_loc=queries,
        key_start_loc=start_loc(totals),
        given={**given, "k_scale": torch.as_tensor(k_scale, dtype=torch.float32, device=q.device)},
        metadata=MLACommonDecodeMetadata(block_table=block_table, **batch_metadata(lengths, totals, q.device)),
        case=case,
    )
    return Problem(case, case.id, q.device, (only,))


def sparse(
    *,
    q: Tensor,
    topk_indices: Tensor,
    scale: float,
    kv: Tensor | None = None,
    kv_cache: Tensor | None = None,
    kv_lora_rank: int = 512,
    index_space: str = roles.IndexSpace.SLOT,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | float = 1.0,
    seq_lens: Tensor | None = None,
    cu_seqlens_q: forms.Starts = None,
    block_table: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_kv_cache_dtype: str = "auto",
    extra_topk_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    lse: bool = True,
) -> Problem:
    """Absorbed queries against the keys that lists name, as ``golden.sparse`` has it."""
    forms.require("sparse", {}, q=q)
    stored = kv_cache if kv is None else kv
    if stored is None or (kv is not None and kv_cache is not None):
        got = "neither" if stored is None else "both"
        raise InputError(f"kv: expected gathered keys in kv or a cache in kv_cache, got {got}")
    forms.require("sparse", {"T": len(q), "N": q.shape[1], "D": q.shape[2]}, topk_indices=topk_indices, kv=kv,
                  topk_length=topk_length, attn_sink=attn_sink)  # fmt: skip
    starts = forms.one_each(cu_seqlens_q, q, seq_lens) if seq_lens is not None else cu_seqlens_q
    queries = forms.starts_of("cu_seqlens_q", starts, len(q))
    lengths = forms.lengths_of(queries)
    if kv is None:
        forms.require_entries("kv_cache", stored, kv_cache_dtype, q, kv_lora_rank)
    numbers = forms.counted(topk_indices, topk_length)
    if index_space != roles.IndexSpace.SLOT:
        numbers = forms.slots_of_positions(numbers, queries, block_table, workspace_starts, stored.shape[1])
    used, selected = forms.places_of("topk_indices", numbers, stored)
    keys = forms.meaning_of(stored, used, kv_cache_dtype, k_scale, kv_lora_rank, q)
    if extra_kv_cache is not None:
        forms.require_entries("extra_kv_cache", extra_kv_cache, extra_kv_cache_dtype, q, kv_lora_rank)
        if extra_topk_indices is None:
            raise InputError("extra_topk_indices: expected the indices [T, K'] of extra_kv_cache, got none")
        numbers = forms.counted(extra_topk_indices, extra_topk_length)
        further, lists = forms.places_of("extra_topk_indices", numbers, extra_kv_cache)
        selected = torch.cat((selected, lists.where(lists == NO_KEY, lists + len(keys))), dim=1)
        second = forms.meaning_of(extra_kv_cache, further, extra_kv_cache_dtype, k_scale, kv_lora_rank, q)
        keys = torch.cat((keys, second))
    paged = kv is None
    case = forms.latent_case("sparse_lse", scale, q, kv_lora_rank, lengths, longest_lists(selected, queries), lse=lse,
                             call=Call.SPARSE_DECODE if paged else Call.SPARSE_PREFILL, topk=topk_indices.shape[1],
                             cache=kv_cache_dtype, extra="none" if extra_kv_cache is None else extra_kv_cache_dtype,
                             **({"page": stored.shape[1]} if paged else {}))  # fmt: skip
    told = batch_metadata(lengths, lengths if seq_lens is None else seq_lens.tolist(), q.device)
    only = SparseCall(
        q=q, k=keys, v=keys[..., :kv_lora_rank], query_start_loc=queries, key_start_loc=(0,) * len(queries),
        given={"q": q, "kv_cache" if paged else "kv": stored, "k_scale": k_scale},
        named={"topk_indices": topk_indices, "topk_length": topk_length, "attn_sink": attn_sink},
        selected=selected, slots=used, case=case,
        metadata=list_metadata(told, block_table, index_space),
    )  # fmt: skip
    return Problem(case, case.id, q.device, (only,))


def indexer(
    *,
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    seq_lens: Tensor,
    kv_cache_dtype: str = "fp8_index",
    block_table: Tensor | None = None,
    workspace_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    cu_seqlens_q: forms.Starts = None,
    topk_tokens: int = 0,
    index_space: str = roles.IndexSpace.POSITION,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    lse: bool = False,
) -> Problem:
    """Queries of an indexer against paged or gathered keys: their scores, or with ``topk_tokens`` the best tokens."""
    forms.require("indexer", {}, q=q)
    queries = forms.starts_of("cu_seqlens_q", forms.one_each(cu_seqlens_q, q, seq_lens), len(q), len(seq_lens))
    sizes = {"T": len(q), "H": q.shape[1], "B": len(queries) - 1, "S": len(k)}
    forms.require("indexer", sizes, weights=weights, seq_lens=seq_lens, block_table=block_table,
                  workspace_starts=workspace_starts, k_scale=k_scale)  # fmt: skip
    totals, lengths, width = seq_lens.tolist(), forms.lengths_of(queries), q.shape[2]
    gathered = workspace_starts is not None
    if workspace_starts is not None:
        if k.dim() != 2 or k.shape[1] != width:
            raise InputError(f"k: expected gathered keys [S, {width}], as wide as q, got {list(k.shape)}")
        slots = torch.cat([start + torch.arange(total, device=k.device)
                           for start, total in zip(workspace_starts.tolist(), totals, strict=True)])  # fmt: skip
        keys = k[slots].double() if k_scale is None else k[slots].double() * k_scale[slots, None].double()
    else:
        if block_table is None:
            raise InputError(
                "block_table: expected one for a paged k, or workspace_starts of gathered keys, got neither"
            )
        slots = forms.slots_of(k, kv_cache_dtype, q, width, block_table, totals, "k")
        keys = forms.meaning_of(k, slots, kv_cache_dtype, 1.0, width, q)[:, 0]
    selects = {"call": Call.INDEX_TOPK, "topk": topk_tokens, "space": index_space}
    case = forms.latent_case("indexer_logits", width**-0.5, q, width, lengths, totals, cache=kv_cache_dtype,
                             gathered=gathered,
                             **(selects if topk_tokens else {"call": Call.INDEX_LOGITS}))  # fmt: skip
    told = batch_metadata(lengths, totals, q.device)
    told["max_seq_len"] = max_seqlen_k or told["max_seq_len"]
    only = IndexerCall(
        q=q, k=keys.unsqueeze(1), query_start_loc=queries, key_start_loc=start_loc(totals), slots=slots.cpu(),
        given={"q": q, "weights": weights, "k": k, **({"topk_tokens": topk_tokens} if topk_tokens else {})},
        named={"k_scale": k_scale}, case=case,
        metadata=list_metadata(told, workspace_starts if gathered else block_table, index_space, paged=not gathered),
    )  # fmt: skip
    return Problem(case, case.id, q.device, (only,))


def top_k(
    *, logits: Tensor, topk_tokens: int, lengths: Tensor, row_starts: Tensor | None = None, lse: bool = False
) -> Problem:
    """The best columns of each row of given logits."""
    forms.require("top-k", {}, logits=logits)
    forms.require("top-k", {"T": len(logits)}, lengths=lengths, row_starts=row_starts)
    columns, starts = lengths.tolist(), [0] * len(logits) if row_starts is None else row_starts.tolist()
    for row, (start, length) in enumerate(zip(starts, columns, strict=True)):
        if start < 0 or length < 0 or start + length > logits.shape[1]:
            raise InputError(f"lengths: expected rows within the {logits.shape[1]} columns of logits, got columns "
                             f"{start} to {start + length} in row {row}")  # fmt: skip
    case = forms.case_of("select", None, logits, q=(1,) * len(logits), kv=tuple(columns), topk=topk_tokens,
                         call=Call.SELECT, packed=row_starts is not None)  # fmt: skip
    only = TopKCall(
        q=logits, k=logits[:0], given={"logits": logits, "topk_tokens": topk_tokens},
        query_start_loc=tuple(range(len(logits) + 1)), key_start_loc=start_loc(columns), case=case,
        metadata=topk.TopKMetadata(lengths, row_starts, logits.shape[1]),
    )  # fmt: skip
    return Problem(case, case.id, logits.device, (only,))


MAKERS: Mapping[str, Callable[..., Problem]] = {
    "prefill": prefill, "decode": decode, "sparse": sparse, "indexer": indexer, "top-k": top_k,
}  # fmt: skip
_TOLD_BY = {"logits": "top-k", "weights": "indexer", "topk_indices": "sparse", "kv_cache": "decode", "v": "prefill"}
"""What inputs of a role nobody else has, the most telling first."""
