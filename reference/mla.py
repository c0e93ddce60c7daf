"""The routes of MLA (arXiv:2405.04434): three ways to compute one result in float64, each golden.

Arguments: q_nope [T, N, P]; q_pe [T, N, R], rotated; kv_c [S, L]; k_pe [S, R], rotated; weight_kv_b [L, N, P+V]; a
batch as of `attention`, or with `selected` [T, K], the rows of kv_c that each query attends to, -1 for none.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState, attention, merge_states
from mla_conformance.reference.chunking import ContextChunk, plan_context_chunks
from mla_conformance.reference.kv_cache import PagedContext, gather_latents
from mla_conformance.reference.projections import expand_key, split_kv_b_proj, up_project
from mla_conformance.reference.selected import RowLists, selected_attention

Path = Literal["compute_friendly", "data_movement_friendly", "chunked_prefill"]
"""The names of the three routes, as `layer.mla_layer` takes them."""


def compute_friendly(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight_kv_b: Tensor, **batch: Any
) -> AttentionState:
    """Expand the latents to keys and values, then multi-head attention of widths P+R and V."""
    k_nope, v = up_project(kv_c, weight_kv_b).tensor_split([q_nope.shape[-1]], dim=-1)
    query, key = torch.cat((q_nope.double(), q_pe.double()), dim=-1), expand_key(k_nope, k_pe.double())
    return _attended(query, key, v, **batch)


def data_movement_friendly(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight_kv_b: Tensor, **batch: Any
) -> AttentionState:
    """Absorb W_UK into the query, attend to the latents as one shared head of widths L+R and L, then apply W_UV."""
    w_uk, w_uv = split_kv_b_proj(weight_kv_b, q_nope.shape[-1])
    # q·(kv_c W_UK) = (q W_UK^T)·kv_c, so that the cached latent itself serves as the key of all heads.
    absorbed = torch.einsum("tnp,lnp->tnl", q_nope.double(), w_uk.double())
    query = torch.cat((absorbed, q_pe.double()), dim=-1)
    key = torch.cat((kv_c.double(), k_pe.double()), dim=-1).unsqueeze(1)
    state = _attended(query, key, kv_c.double().unsqueeze(1), **batch)
    return AttentionState(torch.einsum("tnl,lnv->tnv", state.output, w_uv.double()), state.lse)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, *, selected: Tensor | None = None, causal: bool = True, scale: float, **starts: Any
) -> AttentionState:
    if selected is not None:
        return selected_attention(q, k, v, selected, scale=scale)
    return attention(q, k, v, **starts, scale=scale, causal=causal)


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
    lists: RowLists | None = None,
) -> AttentionState:
    """Causal attention to the T new tokens, or what lists name, merged with that to each chunk of the paged context."""
    batch: dict[str, Any] = {"weight_kv_b": weight_kv_b, "query_start_loc": query_start_loc, "scale": scale}
    attend: Any = partial(compute_friendly, q_nope, q_pe, **batch)
    lengths = _lengths(query_start_loc)
    named = None if lists is None else lists.keys(context.context_lens, lengths)
    state = attend(kv_c, k_pe, key_start_loc=query_start_loc, causal=True, selected=named)
    for chunk in plan_context_chunks(
        context.context_lens, workspace_tokens=context.workspace_tokens, page_size=context.cache.shape[1]
    ):
        cached = gather_latents(context.cache, context.block_table, chunk, kv_lora_rank=kv_c.shape[-1])
        named = None if lists is None else lists.keys(chunk.starts, chunk.seq_lens)
        part = attend(*cached, key_start_loc=chunk.key_start_loc, causal=False, selected=named)
        state = merge_states(part, state)
    return state


def prepend_context(
    kv_c: Tensor, k_pe: Tensor, query_start_loc: Sequence[int], context: PagedContext
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Put each request's whole context before its new tokens: (kv_c [S, L], k_pe [S, R], key_start_loc), float64."""
    whole = ContextChunk(starts=(0,) * len(context.context_lens), seq_lens=context.context_lens)
    cached = torch.cat(gather_latents(context.cache, context.block_table, whole, kv_lora_rank=kv_c.shape[-1]), dim=-1)
    new = torch.cat((kv_c, k_pe), dim=-1)[: query_start_loc[-1]]
    pieces = zip(cached.split(whole.seq_lens), new.split(_lengths(query_start_loc)), strict=True)
    latents = torch.cat([piece.to(torch.float64) for request in pieces for piece in request])
    lengths = map(add, whole.seq_lens, _lengths(query_start_loc))
    kv_c, k_pe = latents.tensor_split([kv_c.shape[-1]], dim=-1)
    return kv_c, k_pe, tuple(accumulate(lengths, initial=0))


def _lengths(start_loc: Sequence[int]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in pairwise(start_loc))
