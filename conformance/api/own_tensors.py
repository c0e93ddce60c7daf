"""An author's own tensors as a problem of the suite: the golden result, budget and judge of a case, without a case."""

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import torch

from mla_conformance.api import own_forms as forms
from mla_conformance.backends import decode, roles, topk
from mla_conformance.backends.slots import slots_at
from mla_conformance.cases.case import Call
from mla_conformance.files.whole import InputError
from mla_conformance.problems import calls
from mla_conformance.problems.cached_batch import batch_metadata, list_metadata
from mla_conformance.problems.operands import start_loc
from mla_conformance.reference.selected import NO_KEY
from mla_conformance.roles.decode.problem import DecodeCall
from mla_conformance.roles.indexer.problem import IndexerCall
from mla_conformance.roles.prefill.problem import PrefillCall, assemble_metadata, one_chunk
from mla_conformance.roles.sparse.problem import SparseCall
from mla_conformance.roles.topk.problem import TopKCall

_USUAL: dict[str, Any] = {"causal": True, "kv_lora_rank": 512, "kv_cache_dtype": "auto", "k_scale": 1.0}
_USUAL |= {"extra_kv_cache_dtype": "auto", "topk_tokens": 0, "max_seqlen_q": 0, "max_seqlen_k": 0}
_LATENTS = "kv_lora_rank cu_seqlens_q kv_cache_dtype k_scale"
_SECOND = "extra_kv_cache extra_kv_cache_dtype extra_topk_indices extra_topk_length"
_LONGEST = "max_seqlen_q max_seqlen_k"
# What each role must be given, what it may be given besides, and what is usual of that, where it is not None as here.
_ASKED: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "prefill": ("q k v scale", f"causal cu_seqlens_q cu_seqlens_k {_LONGEST}", {}),
    "decode": ("q kv_cache block_table seq_lens scale", f"{_LATENTS} causal {_LONGEST}", {}),
    "sparse": (
        "q topk_indices scale",
        f"kv kv_cache kv_lora_rank index_space kv_cache_dtype k_scale seq_lens cu_seqlens_q block_table "
        f"workspace_starts topk_length attn_sink {_SECOND} {_LONGEST}",
        {"index_space": roles.IndexSpace.SLOT},
    ),
    "indexer": (
        "q weights k seq_lens",
        f"kv_cache_dtype block_table workspace_starts k_scale cu_seqlens_q topk_tokens index_space {_LONGEST}",
        {"kv_cache_dtype": "fp8_index", "k_scale": None, "index_space": roles.IndexSpace.POSITION},
    ),
    "top-k": ("logits topk_tokens lengths", "row_starts", {}),
}


def _signature(needed: str, further: str, usual: Mapping[str, Any]) -> Signature:
    defaults: dict[str, Any] = dict.fromkeys(needed.split(), Parameter.empty)
    defaults |= {name: {**_USUAL, **usual}.get(name) for name in further.split()}
    return Signature([Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in defaults.items()])


INPUTS: Mapping[str, Signature] = {role: _signature(*asked) for role, asked in _ASKED.items()}
"""What own tensors of a role are called, and what is usual of those that need not be given."""


def problem_of(inputs: Mapping[str, Any], lse: bool) -> calls.Problem:
    """The problem that inputs of a role's table are, with or without an LSE to be judged; an InputError of others."""
    role = next((role for name, role in _TOLD_BY.items() if name in inputs), "")
    if not role:
        kinds = "q, k, v (prefill); q, kv_cache (decode); q, topk_indices (sparse); q, weights, k (indexer); or logits"
        raise InputError(f"assert_close: expected the inputs of a kernel, {kinds}, got {', '.join(inputs) or 'none'}")
    try:
        INPUTS[role].bind(**inputs)
    except TypeError as error:
        known = ", ".join(INPUTS[role].parameters)
        raise InputError(f"assert_close: {error}; the inputs of a {role} are {known}") from error
    return own_problem(role, inputs, lse)


def own_problem(role: str, inputs: Mapping[str, Any], lse: bool = True) -> calls.Problem:
    """The same of a known role; a TypeError of inputs that it does not have."""
    bound = INPUTS[role].bind(**inputs)
    bound.apply_defaults()
    given = bound.arguments
    forms.require(role, {}, **{name: given[name] for name in ("q", "k", "v", "logits") if name in given})
    call = _MAKERS[role](SimpleNamespace(**given, lse=lse))
    return calls.Problem(call.case, call.case.id, call.q.device, (call,))


def _prefill(x: Any) -> PrefillCall:
    sizes = {"N": x.q.shape[1], "P + R": x.q.shape[2], "S": len(x.k)}
    forms.require("prefill", {**sizes, "N": 1 if 1 in (x.k.shape[1], x.v.shape[1]) else x.q.shape[1]}, k=x.k, v=x.v)
    queries = forms.starts_of("cu_seqlens_q", x.cu_seqlens_q, len(x.q))
    same = x.cu_seqlens_k is None and len(x.q) == len(x.k)
    keys = queries if same else forms.starts_of("cu_seqlens_k", x.cu_seqlens_k, len(x.k), len(queries) - 1)
    lengths, seen = forms.lengths_of(queries), forms.lengths_of(keys)
    rope = 64 if x.q.shape[2] > 64 else 0
    dims = f"{x.q.shape[2] - rope}-{rope}-{x.v.shape[2]}-512"
    call = {"call": Call.NEW_TOKENS} if x.causal else {"call": Call.CONTEXT_CHUNK, "kv": seen}
    case = forms.case_of("lse", x.scale, x.q, dims=dims, q=lengths, lse=x.lse, **call)
    return PrefillCall(
        q=x.q, k=x.k, v=x.v, query_start_loc=queries, key_start_loc=keys, chunk_idx=None if x.causal else 0, case=case,
        prepares=True,
        metadata=assemble_metadata(case, lengths, () if x.causal else one_chunk(seen), x.q.dtype, x.q.device),
    )  # fmt: skip


def _decode(x: Any) -> DecodeCall:
    if not x.causal:
        raise InputError("causal: a decode is causal, expected True, got False")
    q, rank = x.q, x.kv_lora_rank
    queries = forms.starts_of("cu_seqlens_q", forms.one_each(x.cu_seqlens_q, q, x.seq_lens), len(q), len(x.seq_lens))
    forms.require("decode", {"B": len(queries) - 1}, seq_lens=x.seq_lens, block_table=x.block_table)
    totals, lengths = x.seq_lens.tolist(), forms.lengths_of(queries)
    slots = forms.slots_of(x.kv_cache, x.kv_cache_dtype, q, rank, x.block_table, totals)
    keys = forms.meaning_of(x.kv_cache, slots, x.kv_cache_dtype, x.k_scale, rank, q)
    about = {"call": Call.DECODE, "page": x.kv_cache.shape[1], "cache": x.kv_cache_dtype, "lse": x.lse}
    given = {"ql_nope": q[..., :rank], "q_pe": q[..., rank:], "kv_cache": x.kv_cache}
    told = batch_metadata(lengths, totals, q.device)
    return DecodeCall(
        q=q, k=keys, v=keys[..., :rank], query_start_loc=queries, key_start_loc=start_loc(totals),
        given={**given, "k_scale": torch.as_tensor(x.k_scale, dtype=torch.float32, device=q.device)},
        metadata=decode.MLACommonDecodeMetadata(block_table=x.block_table, **told),
        case=forms.latent_case("decode", x.scale, q, rank, lengths, totals, **about),
    )  # fmt: skip


def _sparse(x: Any) -> SparseCall:
    q, rank, paged = x.q, x.kv_lora_rank, x.kv is None
    stored = x.kv_cache if paged else x.kv
    if stored is None or not (paged or x.kv_cache is None):
        got = "neither" if stored is None else "both"
        raise InputError(f"kv: expected gathered keys in kv or a cache in kv_cache, got {got}")
    named = {name: vars(x)[name] for name in ("topk_indices", "kv", "topk_length", "attn_sink")}
    forms.require("sparse", {"T": len(q), "N": q.shape[1], "D": q.shape[2]}, **named)
    starts = x.cu_seqlens_q if x.seq_lens is None else forms.one_each(x.cu_seqlens_q, q, x.seq_lens)
    queries = forms.starts_of("cu_seqlens_q", starts, len(q))
    lengths = forms.lengths_of(queries)
    if paged:
        forms.require_entries("kv_cache", stored, x.kv_cache_dtype, q, rank)
    numbers = forms.counted(x.topk_indices, x.topk_length)
    if x.index_space != roles.IndexSpace.SLOT:  # then they are positions in each row's request
        request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(numbers.device)
        if x.workspace_starts is not None:
            slots = x.workspace_starts.long()[request].unsqueeze(1) + numbers
        elif x.block_table is not None:
            slots = slots_at(x.block_table, request.unsqueeze(1), numbers, stored.shape[1])
        else:
            both = "one where index_space is not slot, or workspace_starts"
            raise InputError(f"block_table: expected {both}, got neither")
        numbers = slots.where(numbers != NO_KEY, NO_KEY)
    used, selected = forms.places_of("topk_indices", numbers, stored)
    keys = forms.meaning_of(stored, used, x.kv_cache_dtype, x.k_scale, rank, q)
    if x.extra_kv_cache is not None:
        forms.require_entries("extra_kv_cache", x.extra_kv_cache, x.extra_kv_cache_dtype, q, rank)
        if x.extra_topk_indices is None:
            raise InputError("extra_topk_indices: expected the indices [T, K'] of extra_kv_cache, got none")
        numbers = forms.counted(x.extra_topk_indices, x.extra_topk_length)
        further, lists = forms.places_of("extra_topk_indices", numbers, x.extra_kv_cache)
        selected = torch.cat((selected, lists.where(lists == NO_KEY, lists + len(keys))), dim=1)
        second = forms.meaning_of(x.extra_kv_cache, further, x.extra_kv_cache_dtype, x.k_scale, rank, q)
        keys = torch.cat((keys, second))
    about = {"call": Call.SPARSE_DECODE, "page": stored.shape[1]} if paged else {"call": Call.SPARSE_PREFILL}
    about |= {"extra": "none" if x.extra_kv_cache is None else x.extra_kv_cache_dtype, "cache": x.kv_cache_dtype}
    about |= {"topk": x.topk_indices.shape[1], "lse": x.lse}
    told = batch_metadata(lengths, lengths if x.seq_lens is None else x.seq_lens.tolist(), q.device)
    seen = calls.longest_lists(selected, queries)
    return SparseCall(
        q=q, k=keys, v=keys[..., :rank], query_start_loc=queries, key_start_loc=(0,) * len(queries),
        given={"q": q, "kv_cache" if paged else "kv": stored, "k_scale": x.k_scale},
        named={name: each for name, each in named.items() if name != "kv"}, selected=selected, slots=used,
        metadata=list_metadata(told, x.block_table, x.index_space),
        case=forms.latent_case("sparse_lse", x.scale, q, rank, lengths, seen, **about),
    )  # fmt: skip


def _indexer(x: Any) -> IndexerCall:
    q, k, width = x.q, x.k, x.q.shape[2]
    queries = forms.starts_of("cu_seqlens_q", forms.one_each(x.cu_seqlens_q, q, x.seq_lens), len(q), len(x.seq_lens))
    sizes = {"T": len(q), "H": q.shape[1], "B": len(queries) - 1, "S": len(k)}
    asked = ("weights", "seq_lens", "block_table", "workspace_starts", "k_scale")
    forms.require("indexer", sizes, **{name: vars(x)[name] for name in asked})
    totals, lengths, gathered = x.seq_lens.tolist(), forms.lengths_of(queries), x.workspace_starts is not None
    if gathered:
        if k.dim() != 2 or k.shape[1] != width:
            raise InputError(f"k: expected gathered keys [S, {width}], as wide as q, got {list(k.shape)}")
        starts = zip(x.workspace_starts.tolist(), totals, strict=True)
        slots = torch.cat([start + torch.arange(total, device=k.device) for start, total in starts])
        keys = k[slots].double() if x.k_scale is None else k[slots].double() * x.k_scale[slots, None].double()
    else:
        if x.block_table is None:
            other = "workspace_starts of gathered keys"
            raise InputError(f"block_table: expected one for a paged k, or {other}, got neither")
        slots = forms.slots_of(k, x.kv_cache_dtype, q, width, x.block_table, totals, "k")
        keys = forms.meaning_of(k, slots, x.kv_cache_dtype, 1.0, width, q)[:, 0]
    selects = {"call": Call.INDEX_TOPK, "topk": x.topk_tokens, "space": x.index_space}
    about = {**(selects if x.topk_tokens else {"call": Call.INDEX_LOGITS}), "gathered": gathered}
    about["cache"] = x.kv_cache_dtype
    told, table = batch_metadata(lengths, totals, q.device), x.workspace_starts if gathered else x.block_table
    told["max_seq_len"] = x.max_seqlen_k or told["max_seq_len"]
    return IndexerCall(
        q=q, k=keys.unsqueeze(1), query_start_loc=queries, key_start_loc=start_loc(totals), slots=slots.cpu(),
        given={"q": q, "weights": x.weights, "k": k, **({"topk_tokens": x.topk_tokens} if x.topk_tokens else {})},
        named={"k_scale": x.k_scale}, metadata=list_metadata(told, table, x.index_space, paged=not gathered),
        case=forms.latent_case("indexer_logits", width**-0.5, q, width, lengths, totals, **about),
    )  # fmt: skip


def _top_k(x: Any) -> TopKCall:
    logits = x.logits
    forms.require("top-k", {"T": len(logits)}, lengths=x.lengths, row_starts=x.row_starts)
    columns, starts = x.lengths.tolist(), [0] * len(logits) if x.row_starts is None else x.row_starts.tolist()
    for row, (start, length) in enumerate(zip(starts, columns, strict=True)):
        if start < 0 or length < 0 or start + length > logits.shape[1]:
            got = f"columns {start} to {start + length} in row {row}"
            raise InputError(f"lengths: expected rows within the {logits.shape[1]} columns of logits, got {got}")
    about = {"call": Call.SELECT, "topk": x.topk_tokens, "packed": x.row_starts is not None}
    return TopKCall(
        q=logits, k=logits[:0], query_start_loc=tuple(range(len(logits) + 1)), key_start_loc=start_loc(columns),
        given={"logits": logits, "topk_tokens": x.topk_tokens},
        metadata=topk.TopKMetadata(x.lengths, x.row_starts, logits.shape[1]),
        case=forms.case_of("select", None, logits, q=(1,) * len(logits), kv=tuple(columns), **about),
    )  # fmt: skip


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "prefill": _prefill, "decode": _decode, "sparse": _sparse, "indexer": _indexer, "top-k": _top_k,
}  # fmt: skip
_TOLD_BY = {"logits": "top-k", "weights": "indexer", "topk_indices": "sparse", "kv_cache": "decode", "v": "prefill"}
"""What inputs of a role nobody else has, the most telling first."""
