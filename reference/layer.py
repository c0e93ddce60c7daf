"""A whole MLA layer, from hidden states to hidden states: what models do around the attention, by any of its routes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from mla_conformance.reference.attention import AttentionState
from mla_conformance.reference.kv_cache import PagedContext
from mla_conformance.reference.layer_spec import LayerSpec
from mla_conformance.reference.mla import (
    Path,
    chunked_prefill,
    compute_friendly,
    data_movement_friendly,
    prepend_context,
)
from mla_conformance.reference.projections import MLAWeights, kv_b_proj, rms_norm
from mla_conformance.reference.rope import rope
from mla_conformance.reference.row_lists import RowLists
from mla_conformance.reference.selected import with_sink


def mla_layer(
    hidden: Tensor,
    positions: Tensor,
    weights: MLAWeights,
    spec: LayerSpec,
    *,
    query_start_loc: Sequence[int],
    context: PagedContext,
    path: Path,
    selected: Tensor | None = None,
) -> Tensor:
    """The whole layer, from hidden states [T, H] and positions [T] (tokens) to hidden states [T, H] float64.

    The context is what `latents` gave of it; it is read and not written. Rows past query_start_loc[-1] are not in the
    result. path: one of the three routes. selected: [rows, K] integers, for a spec that selects: tokens of each row's
    request, counted from the first of its context and up to its own; -1 names none.
    Raises ValueError for another path, weights that are not those of the spec, and lists where it has none.
    """
    if path not in get_args(Path):
        raise ValueError(f"expected a path of {', '.join(get_args(Path))}, got {path!r}")
    spec.check(weights)
    if spec.selects != (selected is not None):
        raise ValueError(f"{spec.model}: expected {'' if spec.selects else 'no '}lists of selected tokens")
    rows = slice(query_start_loc[-1])
    w, h, positions = weights.widened(), hidden[rows].to(torch.float64), positions[rows]
    lists = RowLists.of(selected, spec.window, query_start_loc, context.context_lens, h.device)
    q_c = _query_latent(h, w, spec)
    operands = (*_queries(q_c, positions, w, spec), *latents(h, positions, w, spec), kv_b_proj(w.W_UK, w.W_UV))
    state = _attend(path, operands, query_start_loc, context, spec.scale, lists)
    output = state.output if w.sink is None else with_sink(state, w.sink).output
    if w.W_G is not None:
        gated = h if spec.gate == "hidden" else q_c
        output = output * torch.sigmoid(torch.einsum("tc,cnv->tnv", gated, w.W_G))
    return output.flatten(1) @ w.W_O


def latents(hidden: Tensor, positions: Tensor, weights: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """What a layer caches of hidden states [T, H] at positions [T]: (kv_c [T, L], k_pe [T, R]), float64.

    Raises ValueError for weights that are not those of the spec.
    """
    spec.check(weights)
    w, h = weights.widened(), hidden.to(torch.float64)
    kv_c = _normed(h @ w.W_DKV, w.kv_norm, spec.kv_norm)
    k_pe = _normed(h @ w.W_KR, w.k_pe_norm, spec.k_pe_norm)
    return spec.kv_factor * kv_c, _rotated(k_pe, positions, spec)


def _query_latent(h: Tensor, w: MLAWeights, spec: LayerSpec) -> Tensor:
    """[T, columns] that queries are projected from."""
    q_c = h if w.W_DQ is None else h @ w.W_DQ
    normed = _normed(q_c, w.q_norm, spec.q_norm)
    return torch.cat((normed, q_c), dim=-1) if spec.doubled_query_latent else normed


def _queries(q_c: Tensor, positions: Tensor, w: MLAWeights, spec: LayerSpec) -> tuple[Tensor, Tensor]:
    """q_nope [T, N, P] and q_pe [T, N, R], the latter rotated."""
    factor = torch.full((len(q_c), 1, 1), spec.q_factor, dtype=torch.float64, device=q_c.device)
    if spec.growth is not None:
        factor = factor * spec.growth.factors(positions)[:, None, None]
    q_nope, q_pe = (torch.einsum("tl,lnd->tnd", q_c, part) for part in (w.W_UQ, w.W_QR))
    return factor * q_nope, factor * _rotated(q_pe, positions, spec)


def _normed(x: Tensor, weight: Tensor | None, epsilon: float | None) -> Tensor:
    return x if weight is None or epsilon is None else rms_norm(x, weight, epsilon)


def _rotated(x: Tensor, positions: Tensor, spec: LayerSpec) -> Tensor:
    return x if spec.rotation is None else rope(x, positions, spec.rotation)


def _attend(
    path: Path,
    operands: tuple[Tensor, ...],
    query_start_loc: Sequence[int],
    context: PagedContext,
    scale: float,
    lists: RowLists | None,
) -> AttentionState:
    """One route over the context and the new tokens, for operands (q_nope, q_pe, kv_c, k_pe, weight_kv_b)."""
    if path == "chunked_prefill":
        return chunked_prefill(*operands, query_start_loc=query_start_loc, context=context, scale=scale, lists=lists)
    route = compute_friendly if path == "compute_friendly" else data_movement_friendly
    q_nope, q_pe, kv_c, k_pe, weight_kv_b = operands
    kv_c, k_pe, key_start_loc = prepend_context(kv_c, k_pe, query_start_loc, context)
    lengths = [stop - start for start, stop in pairwise(key_start_loc)]
    return route(
        q_nope,
        q_pe,
        kv_c,
        k_pe,
        weight_kv_b,
        query_start_loc=query_start_loc,
        key_start_loc=key_start_loc,
        scale=scale,
        selected=None if lists is None else lists.keys([0] * len(lengths), lengths),
    )
