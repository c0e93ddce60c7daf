"""A whole layer from hidden states to hidden states, by three golden routes in float64.

What is judged takes the steps of ``projections`` one by one; the proof holds them together against models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mla_conformance.reference import chunking, dimensions, projections
from mla_conformance.reference.attention import AttentionState, attention, merge
from mla_conformance.reference.selected import RowLists, selected_attention, with_sink

Path = Literal["compute_friendly", "data_movement_friendly", "chunked_prefill"]
GateInput = Literal["hidden", "query_latent"]  # what an output gate is projected from


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """Sizes of one MLA layer: H, N, Lq, L and those of a head."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None  # Lq; None where queries are projected from the hidden state itself, without a latent
    kv_lora_rank: int
    head: dimensions.MLADimensions


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries that grow with their position p: times 1 + beta · ln(1 + ⌊p / period⌋), as Llama 4 and Mistral 4 do."""

    beta: float
    period: int

    def factors(self, positions: Tensor) -> Tensor:
        return 1 + self.beta * torch.log1p(torch.div(positions, self.period, rounding_mode="floor").to(torch.float64))


@dataclass(frozen=True, kw_only=True)
class WholeLayer(projections.LayerSpec):
    model: str  # name of the model
    dims: ModelDimensions  # sizes
    scale: float  # softmax scale with all that a model multiplies it by, `yarn_softmax_factor` among it
    growth: QueryGrowth | None = None  # of the queries with their position; None without
    gate: GateInput | None = None  # what the output's gate is projected from: its sigmoid times the output before W_O
    window: int | None = None  # tokens that a row sees, its own the last; None for all
    sink: bool = False  # whether each head has the logit of a sink among its weights
    selects: bool = False  # whether a row attends to the tokens of a list that an indexer chose


@dataclass(frozen=True)
class PagedContext:
    """The context of a batch: where its latents lie, and how much of it may be expanded at a time."""

    cache: Tensor  # [num_blocks, page_size, L+R]
    block_table: Tensor  # [B, max_blocks] integers
    context_lens: tuple[int, ...]  # B lengths in tokens
    workspace_tokens: int  # as in `plan_context_chunks`

    def gathered(self, chunk: chunking.ContextChunk) -> Tensor:
        """[S, L+R] of a chunk of every request's context, requests one after another."""
        found = []
        for blocks, start, length in zip(self.block_table, chunk.starts, chunk.seq_lens, strict=True):
            token, page = torch.arange(start, start + length), self.cache.shape[1]
            found.append(self.cache[blocks[token // page], token % page])
        return torch.cat(found)


def mla_layer(
    hidden: Tensor,
    positions: Tensor,
    weights: projections.MLAWeights,
    spec: WholeLayer,
    *,
    query_start_loc: Sequence[int],
    context: PagedContext,
    path: Path,  # one of the three routes
    selected: Tensor | None = None,  # [rows, K] integers, for a spec that selects: tokens of each row's request, or -1
) -> Tensor:
    """The whole layer, from hidden states [T, H] and positions [T] to hidden states [T, H] float64."""
    if spec.selects != (selected is not None):
        raise ValueError(f"{spec.model}: expected {'' if spec.selects else 'no '}lists of selected tokens")
    rows = slice(query_start_loc[-1])
    w, h, positions = weights.widened(), hidden[rows].to(torch.float64), positions[rows]
    lists = RowLists.of(selected, spec.window, query_start_loc, context.context_lens, h.device)
    q_c = projections.query_latent(h, w, spec)
    factor = 1.0 if spec.growth is None else spec.growth.factors(positions)[:, None, None]
    q_nope, q_pe = (factor * part for part in projections.queries(q_c, positions, w, spec))
    route, weight = ROUTES[path], projections.kv_b_proj(w.W_UK, w.W_UV)
    attend = partial(route, q_nope, q_pe, weight_kv_b=weight, query_start_loc=query_start_loc, scale=spec.scale)
    prefill = _in_chunks if path == "chunked_prefill" else _over_all
    state = prefill(attend, projections.latents(h, positions, w, spec), query_start_loc, context, lists)
    output = state.output if w.sink is None else with_sink(state, w.sink).output
    if w.W_G is not None:
        gated = h if spec.gate == "hidden" else q_c
        output = output * torch.sigmoid(torch.einsum("tc,cnv->tnv", gated, w.W_G))
    return output.flatten(1) @ w.W_O


# Arguments of routes: q_nope [T, N, P]; q_pe [T, N, R], rotated; kv_c [S, L]; k_pe [S, R], rotated; weight_kv_b
# [L, N, P+V]; a batch as of `attention`, or with `selected` [T, K], the rows of kv_c that each query attends to, or -1.


def compute_friendly(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight_kv_b: Tensor, **batch: Any
) -> AttentionState:
    """Expand the latents to keys and values, then multi-head attention of widths P+R and V."""
    k_nope, v = projections.up_project(kv_c, weight_kv_b).tensor_split([q_nope.shape[-1]], dim=-1)
    key = projections.expand_key(k_nope, k_pe.double())
    return _attended(torch.cat((q_nope.double(), q_pe.double()), dim=-1), key, v, **batch)


def data_movement_friendly(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight_kv_b: Tensor, **batch: Any
) -> AttentionState:
    """Absorb W_UK into the query, attend to the latents as one shared head of widths L+R and L, then apply W_UV."""
    w_uk, w_uv = projections.split_kv_b_proj(weight_kv_b, q_nope.shape[-1])
    # q·(kv_c W_UK) = (q W_UK^T)·kv_c, so that the cached latent itself serves as the key of all heads.
    absorbed = torch.einsum("tnp,lnp->tnl", q_nope.double(), w_uk.double())
    query = torch.cat((absorbed, q_pe.double()), dim=-1)
    key = torch.cat((kv_c.double(), k_pe.double()), dim=-1).unsqueeze(1)
    state = _attended(query, key, kv_c.double().unsqueeze(1), **batch)
    return AttentionState(torch.einsum("tnl,lnv->tnv", state.output, w_uv.double()), state.lse)


ROUTES = {
    "compute_friendly": compute_friendly,
    "data_movement_friendly": data_movement_friendly,
    "chunked_prefill": compute_friendly,
}


def _attended(
    q: Tensor, k: Tensor, v: Tensor, *, selected: Tensor | None = None, causal: bool = True, scale: float, **starts: Any
) -> AttentionState:
    if selected is not None:
        return selected_attention(q, k, v, selected, scale=scale)
    return attention(q, k, v, **starts, scale=scale, causal=causal)


def _in_chunks(
    attend: Any, new: tuple[Tensor, Tensor], starts: Sequence[int], context: PagedContext, lists: RowLists | None
) -> AttentionState:
    """Causal attention to the new tokens, or what lists name, merged with that to each chunk of the paged context."""
    lengths = [stop - start for start, stop in pairwise(starts)]
    named = lists and lists.keys(context.context_lens, lengths)
    state = attend(*new, key_start_loc=starts, causal=True, selected=named)
    for chunk in chunking.plan_context_chunks(
        context.context_lens, workspace_tokens=context.workspace_tokens, page_size=context.cache.shape[1]
    ):
        cached = context.gathered(chunk).tensor_split([new[0].shape[-1]], dim=-1)
        named = lists and lists.keys(chunk.starts, chunk.seq_lens)
        part = attend(*cached, key_start_loc=chunk.key_start_loc, causal=False, selected=named)
        state = AttentionState(*merge(part.output, part.lse, state.output, state.lse))
    return state


def _over_all(
    attend: Any, new: tuple[Tensor, Tensor], starts: Sequence[int], context: PagedContext, lists: RowLists | None
) -> AttentionState:
    """Attention to each request's whole context before its new tokens, at once."""
    lens = context.context_lens
    cached = context.gathered(chunking.ContextChunk(starts=(0,) * len(lens), seq_lens=lens))
    own = [stop - start for start, stop in pairwise(starts)]
    pieces = zip(cached.split(lens), torch.cat(new, dim=-1).split(own), strict=True)
    both = torch.cat([piece.to(torch.float64) for request in pieces for piece in request])
    lengths = [before + length for before, length in zip(lens, own, strict=True)]
    named = lists and lists.keys([0] * len(lengths), lengths)
    ends = tuple(accumulate(lengths, initial=0))
    return attend(*both.tensor_split([new[0].shape[-1]], dim=-1), key_start_loc=ends, selected=named)
