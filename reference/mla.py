"""The routes of MLA: three ways to compute one result, each golden.

Compute-friendly: expand the latents to keys and values, then multi-head attention of widths P+R and V. Data-movement
friendly: absorb W_UK into the query, attend to the latents themselves as one shared head of widths L+R and L, then
apply W_UV. Chunked prefill: compute-friendly over the new tokens and over one chunk of the cached context at a time,
merged by LSE. Source: the MLA documentation of vLLM and arXiv:2405.04434; its listing puts the new tokens
before the cached ones, which a bottom-right causal mask forbids, so here the context comes first.

Shared arguments: q_nope [T, N, P]; q_pe [T, N, R], rotated; kv_c [S, L]; k_pe [S, R], rotated; weight_kv_b
[L, N, P+V] as `kv_b_proj` builds it; start locations and `scale` as in `attention`. Any float dtype; results float64.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import add
from typing import Literal, get_args

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention
from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks
from mla_conformance.reference.kv_cache import PagedContext, gather_latents
from mla_conformance.reference.merge import merge_states
from mla_conformance.reference.projections import (
    MLAWeights,
    absorb_query,
    expand_key,
    kv_b_proj,
    split_kv_b_proj,
    up_project,
    up_project_output,
)
from mla_conformance.reference.rope import rope

Path = Literal["compute_friendly", "data_movement_friendly", "chunked_prefill"]
"""The names of the three routes, as `mla_layer` takes them."""


def compute_friendly(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    weight_kv_b: Tensor,
    *,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
    scale: float,
    causal: bool = True,
) -> AttentionState:
    """Multi-head attention over the expanded keys and values. Output [T, N, V]."""
    k_nope, v = up_project(kv_c, weight_kv_b).tensor_split([q_nope.shape[-1]], dim=-1)
    return attention(
        _concat_query(q_nope, q_pe),
        expand_key(k_nope, k_pe.to(torch.float64)),
        v,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        scale=scale,
        causal=causal,
    )


def data_movement_friendly(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    weight_kv_b: Tensor,
    *,
    query_start_loc: Sequence[int],
    key_start_loc: Sequence[int],
    scale: float,
    causal: bool = True,
) -> AttentionState:
    """Multi-query attention over the latents, then W_UV. Output [T, N, V].

    A kernel of this route returns [T, N, L]; its golden state with terms is `attention` over the absorbed query.
    """
    w_uk, w_uv = split_kv_b_proj(weight_kv_b, q_nope.shape[-1])
    latents = kv_c.to(torch.float64)
    state = attention(
        _concat_query(absorb_query(q_nope, w_uk), q_pe),
        torch.cat((latents, k_pe.to(torch.float64)), dim=-1).unsqueeze(1),
        latents.unsqueeze(1),
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        scale=scale,
        causal=causal,
    )
    return AttentionState(up_project_output(state.output, w_uv), state.lse)


def chunked_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    weight_kv_b: Tensor,
    *,
    query_start_loc: Sequence[int],
    context: PagedContext,
    scale: float,
) -> AttentionState:
    """Causal attention to the T new tokens (kv_c, k_pe), merged with each chunk of the paged context, unmasked.

    Output [T, N, V]. Raises ValueError as `plan_context_chunks` and `gather_latents` do.
    """
    attend = partial(
        compute_friendly,
        q_nope,
        q_pe,
        weight_kv_b=weight_kv_b,
        query_start_loc=query_start_loc,
        scale=scale,
    )
    state = attend(kv_c, k_pe, key_start_loc=query_start_loc, causal=True)
    for chunk in plan_context_chunks(
        context.context_lens, workspace_tokens=context.workspace_tokens, page_size=context.cache.shape[1]
    ):
        cached = gather_latents(context.cache, context.block_table, chunk, kv_lora_rank=kv_c.shape[-1])
        state = merge_states(attend(*cached, key_start_loc=chunk.key_start_loc, causal=False), state)
    return state


def prepend_context(
    kv_c: Tensor, k_pe: Tensor, query_start_loc: Sequence[int], context: PagedContext
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Put each request's whole context before its new tokens: (kv_c [S, L], k_pe [S, R], key_start_loc), float64.

    The unchunked routes take these as their keys. Raises ValueError as `gather_latents` does.
    """
    whole = ContextChunk(starts=(0,) * len(context.context_lens), seq_lens=context.context_lens)
    cached = torch.cat(gather_latents(context.cache, context.block_table, whole, kv_lora_rank=kv_c.shape[-1]), dim=-1)
    new = torch.cat((kv_c, k_pe), dim=-1)[: query_start_loc[-1]]
    pieces = zip(cached.split(whole.seq_lens), new.split(_lengths(query_start_loc)), strict=True)
    latents = torch.cat([piece.to(torch.float64) for request in pieces for piece in request])
    lengths = map(add, whole.seq_lens, _lengths(query_start_loc))
    kv_c, k_pe = latents.tensor_split([kv_c.shape[-1]], dim=-1)
    return kv_c, k_pe, tuple(accumulate(lengths, initial=0))


def mla_layer(
    hidden: Tensor,
    positions: Tensor,
    weights: MLAWeights,
    *,
    query_start_loc: Sequence[int],
    context: PagedContext,
    scale: float,
    path: Path,
    interleaved: bool = True,
    rope_base: float = 10000.0,
) -> Tensor:
    """The whole layer, from hidden states [T, H] and positions [T] (tokens) to hidden states [T, H] float64.

    The normalisations of the latents, where a model has them, are outside: they precede every kernel. The context is
    read and not written; rows past query_start_loc[-1] are not in the result.
    path: one of the three routes; ValueError for another name.
    """
    if path not in get_args(Path):
        raise ValueError(f"expected a path of {', '.join(get_args(Path))}, got {path!r}")
    w = MLAWeights(**{name: weight.to(torch.float64) for name, weight in vars(weights).items()})
    h = hidden.to(torch.float64)
    q_c = h @ w.W_DQ
    q_nope = torch.einsum("tl,lnp->tnp", q_c, w.W_UQ)
    q_pe = rope(torch.einsum("tl,lnr->tnr", q_c, w.W_QR), positions, base=rope_base, interleaved=interleaved)
    k_pe = rope(h @ w.W_KR, positions, base=rope_base, interleaved=interleaved)
    operands = (q_nope, q_pe, h @ w.W_DKV, k_pe, kv_b_proj(w.W_UK, w.W_UV))
    state = _attend_over_context(path, *operands, query_start_loc, context, scale)
    return state.output.flatten(1) @ w.W_O


def _attend_over_context(
    path: Path,
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    weight_kv_b: Tensor,
    query_start_loc: Sequence[int],
    context: PagedContext,
    scale: float,
) -> AttentionState:
    """One route over the context and the new tokens."""
    if path == "chunked_prefill":
        return chunked_prefill(
            q_nope, q_pe, kv_c, k_pe, weight_kv_b, query_start_loc=query_start_loc, context=context, scale=scale
        )
    route = compute_friendly if path == "compute_friendly" else data_movement_friendly
    kv_c, k_pe, key_start_loc = prepend_context(kv_c, k_pe, query_start_loc, context)
    return route(
        q_nope, q_pe, kv_c, k_pe, weight_kv_b, query_start_loc=query_start_loc, key_start_loc=key_start_loc, scale=scale
    )


def _concat_query(nope: Tensor, pe: Tensor) -> Tensor:
    """[T, N, P or L] and [T, N, R] to one query, float64."""
    return torch.cat((nope.to(torch.float64), pe.to(torch.float64)), dim=-1)


def _lengths(start_loc: Sequence[int]) -> tuple[int, ...]:
    """Rows of each request."""
    return tuple(stop - start for start, stop in pairwise(start_loc))
