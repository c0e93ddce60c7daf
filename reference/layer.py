"""A whole MLA layer, from hidden states to hidden states: what models do around the attention, by any of its routes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mla_conformance.reference.dimensions import ModelDimensions
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.mla import (
    Path,
    chunked_prefill,
    compute_friendly,
    data_movement_friendly,
    prepend_context,
)
from mla_conformance.reference.projections import MLAWeights, kv_b_proj, rms_norm
from mla_conformance.reference.rope import Rotation, rope
from mla_conformance.reference.selected import RowLists, with_sink

GateInput = Literal["hidden", "query_latent"]  # what an output gate is projected from


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """Queries that grow with their position p: times 1 + beta · ln(1 + ⌊p / period⌋), as Llama 4 and Mistral 4 do."""

    beta: float
    period: int

    def factors(self, positions: Tensor) -> Tensor:
        return 1 + self.beta * torch.log1p(torch.div(positions, self.period, rounding_mode="floor").to(torch.float64))


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    model: str  # name of the model; errors begin with it
    dims: ModelDimensions  # sizes
    scale: float  # softmax scale with all that a model multiplies it by, YaRN's `softmax_factor` among it
    rotation: Rotation | None  # RoPE of queries and shared key; None rotates nothing, however wide the rotary part is
    q_norm: float | None = None  # epsilon of an RMSNorm of the latent query; None without
    kv_norm: float | None = None  # of the cached latent
    k_pe_norm: float | None = None  # of the shared key before it is rotated
    doubled_query_latent: bool = False  # whether queries are projected from the latent as it was as well
    q_factor: float = 1.0  # of the queries, behind the norms
    kv_factor: float = 1.0  # of the cached latent
    growth: QueryGrowth | None = None  # of the queries with their position; None without
    gate: GateInput | None = None  # what the output's gate is projected from: its sigmoid times the output before W_O
    window: int | None = None  # tokens that a row sees, its own the last; None for all
    sink: bool = False  # whether each head has the logit of a sink among its weights
    selects: bool = False  # whether a row attends to the tokens of a list that an indexer chose


def mla_layer(
    hidden: Tensor,
    positions: Tensor,
    weights: MLAWeights,
    spec: LayerSpec,
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
    q_c = query_latent(h, w, spec)
    operands = (*queries(q_c, positions, w, spec), *latents(h, positions, w, spec), kv_b_proj(w.W_UK, w.W_UV))
    if path == "chunked_prefill":
        state = chunked_prefill(
            *operands, query_start_loc=query_start_loc, context=context, scale=spec.scale, lists=lists
        )
    else:
        route = compute_friendly if path == "compute_friendly" else data_movement_friendly
        q_nope, q_pe, kv_c, k_pe, weight_kv_b = operands
        kv_c, k_pe, key_start_loc = prepend_context(kv_c, k_pe, query_start_loc, context)
        lengths = [stop - start for start, stop in pairwise(key_start_loc)]
        state = route(
            *(q_nope, q_pe, kv_c, k_pe, weight_kv_b),
            query_start_loc=query_start_loc,
            key_start_loc=key_start_loc,
            scale=spec.scale,
            selected=None if lists is None else lists.keys([0] * len(lengths), lengths),
        )
    output = state.output if w.sink is None else with_sink(state, w.sink).output
    if w.W_G is not None:
        gated = h if spec.gate == "hidden" else q_c
        output = output * torch.sigmoid(torch.einsum("tc,cnv->tnv", gated, w.W_G))
    return output.flatten(1) @ w.W_O


def latents(hidden: Tensor, positions: Tensor, weights: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """What a layer caches of hidden states [T, H] at positions [T]: (kv_c [T, L], k_pe [T, R]), float64."""
    w, h = weights.widened(), hidden.to(torch.float64)
    kv_c = _normed(h @ w.W_DKV, w.kv_norm, spec.kv_norm)
    k_pe = _normed(h @ w.W_KR, w.k_pe_norm, spec.k_pe_norm)
    return spec.kv_factor * kv_c, _rotated(k_pe, positions, spec)


def query_latent(hidden: Tensor, weights: MLAWeights, spec: LayerSpec) -> Tensor:
    """[T, columns] float64 that queries are projected from, of hidden states [T, H]."""
    w, h = weights.widened(), hidden.to(torch.float64)
    q_c = h if w.W_DQ is None else h @ w.W_DQ
    normed = _normed(q_c, w.q_norm, spec.q_norm)
    return torch.cat((normed, q_c), dim=-1) if spec.doubled_query_latent else normed


def queries(q_c: Tensor, positions: Tensor, weights: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """q_nope [T, N, P] and q_pe [T, N, R] float64, the latter rotated, of what `query_latent` gives."""
    w = weights.widened()
    factor = torch.full((len(q_c), 1, 1), spec.q_factor, dtype=torch.float64, device=q_c.device)
    if spec.growth is not None:
        factor = factor * spec.growth.factors(positions)[:, None, None]
    q_nope, q_pe = (torch.einsum("tl,lnd->tnd", q_c, part) for part in (w.W_UQ, w.W_QR))
    return factor * q_nope, factor * _rotated(q_pe, positions, spec)


def _normed(x: Tensor, weight: Tensor | None, epsilon: float | None) -> Tensor:
    if epsilon is None:
        return x
    assert weight is not None, "a layer with a norm has its weight"
    return rms_norm(x, weight, epsilon)


def _rotated(x: Tensor, positions: Tensor, spec: LayerSpec) -> Tensor:
    return x if spec.rotation is None else rope(x, positions, spec.rotation)
