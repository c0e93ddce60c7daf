"""The indexer of a layer, from hidden states to what its scores are made of: queries, keys and weights.

Sources: the ``Indexer`` of DeepSeek-V3.2-Exp's inference code and of transformers' DeepSeek-V3.2, GLM-5 and HY-V4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.prepare_index import Prepared, layer_norm, rotated
from mla_conformance.reference.rope import Rotation


@dataclass(frozen=True)
class IndexerWeights:
    wq_b: Tensor  # [Lq, H, D], latent query to the queries of H heads
    wk: Tensor  # [hidden, D]
    k_norm: Tensor  # [D], of the keys' LayerNorm
    k_norm_bias: Tensor  # [D]
    weights_proj: Tensor  # [hidden, H]


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    rotation: Rotation  # RoPE of queries and keys
    rope_last: bool  # whether the last columns are rotated, not the first
    epsilon: float  # of the keys' norm


def index_keys(hidden: Tensor, positions: Tensor, weights: IndexerWeights, spec: IndexerSpec) -> Prepared:
    """Keys [T, D] of hidden states [T, hidden] at positions [T]: normalised, then rotated."""
    k = Prepared.of(hidden.to(torch.float64) @ weights.wk.to(torch.float64))
    return _turned(layer_norm(k, weights.k_norm, weights.k_norm_bias, spec.epsilon), positions, spec)


def index_queries(query_latent: Tensor, positions: Tensor, weights: IndexerWeights, spec: IndexerSpec) -> Prepared:
    q = torch.einsum("tl,lhd->thd", query_latent.to(torch.float64), weights.wq_b.to(torch.float64))
    return _turned(Prepared.of(q), positions, spec)


def index_weights(hidden: Tensor, weights: IndexerWeights) -> Tensor:
    """[T, H] float64 weights of the heads with all that scales a score."""
    scale = weights.wq_b[0].numel() ** -0.5
    return hidden.to(torch.float64) @ weights.weights_proj.to(torch.float64) * scale


def _turned(x: Prepared, positions: Tensor, spec: IndexerSpec) -> Prepared:
    first = (x.values.shape[-1] - spec.rotation.dim) * spec.rope_last
    return rotated(x, spec.rotation.table(positions), first, spec.rotation.interleaved)
