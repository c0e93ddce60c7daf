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
    """The weights of one indexer, one float dtype and device.

    wq_b [Lq, H, D] latent query to the queries of H heads; wk [hidden, D]; k_norm and k_norm_bias [D], of the keys'
    LayerNorm; weights_proj [hidden, H].
    """

    wq_b: Tensor
    wk: Tensor
    k_norm: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """One indexer, but for its weights.

    rotation: RoPE of queries and keys. rope_last: whether the last columns are rotated, not the first. epsilon: of the
    keys' norm.
    """

    rotation: Rotation
    rope_last: bool
    epsilon: float


@dataclass(frozen=True)
class IndexOperands:
    """What scores are made of: q [T, H, D], k [T, 1, D], and the weights [T, H] float64 with all that scales them."""

    q: Prepared
    k: Prepared
    weights: Tensor


def index_operands(
    hidden: Tensor, query_latent: Tensor, positions: Tensor, weights: IndexerWeights, spec: IndexerSpec
) -> IndexOperands:
    """Queries, keys and weights of hidden states [T, hidden] with normalised latents [T, Lq] at positions [T]."""
    h, (heads, width) = hidden.to(torch.float64), weights.wq_b.shape[1:]
    table, first = spec.rotation.table(positions), (width - spec.rotation.dim) * spec.rope_last
    q = torch.einsum("tl,lhd->thd", query_latent.to(torch.float64), weights.wq_b.to(torch.float64))
    k = (h @ weights.wk.to(torch.float64)).unsqueeze(1)
    normed = layer_norm(Prepared.of(k), weights.k_norm, weights.k_norm_bias, spec.epsilon)
    turned = (rotated(x, table, first, spec.rotation.interleaved) for x in (Prepared.of(q), normed))
    return IndexOperands(*turned, h @ weights.weights_proj.to(torch.float64) * (heads * width) ** -0.5)
