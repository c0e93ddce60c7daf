"""Weights of a sparse layer that pick one column each, times a power of two, so that no projection rounds."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mla_conformance.backends import sparse_layer as interface
from mla_conformance.reference import layer
from mla_conformance.reference.dimensions import ModelDimensions
from mla_conformance.reference.projections import MLAWeights, Rotation
from mla_conformance.roles.layer.problem import selection
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase

EPSILON = 1e-6
_QUARTERS = (1, 2, 3)  # quarters of a turn in which pairs turn from token to token, so that a rotation rounds nothing


@dataclass(frozen=True)
class DrawnLayer:
    """A layer as the reference has it; weights float64 on the CPU."""

    weights: MLAWeights  # of the attention
    index: layer.IndexerWeights  # of the indexer
    spec: layer.LayerSpec  # the layer
    index_spec: layer.IndexerSpec  # the indexer

    @staticmethod
    def draw(case: SparseLayerCase, seed: int) -> "DrawnLayer":
        ranks = {"q_lora_rank": case.q_lora_rank, "kv_lora_rank": case.kv_lora_rank}
        dims = ModelDimensions(hidden_size=case.hidden_size, num_heads=case.heads, head=case.dimensions, **ranks)
        weights, index, turns = _drawn(dims, case.index_heads, case.queries, seed)
        frequencies = tuple(turn * math.pi / 2 for turn in turns)
        rotation = Rotation(frequencies=frequencies, interleaved=case.layer_pairs == "neighbours")
        spec = layer.LayerSpec(rotation=rotation, q_norm=EPSILON, kv_norm=EPSILON)
        rotation = Rotation(frequencies=frequencies, interleaved=case.pairs == "neighbours")
        of_index = layer.IndexerSpec(rotation=rotation, rope_last=case.rope_last, epsilon=EPSILON)
        return DrawnLayer(weights, index, spec, of_index)

    def handed(
        self, case: SparseLayerCase, dtype: torch.dtype, device: torch.device, rank: int
    ) -> interface.SparseLayerWeights:
        """The same as a layer under test gets them on a rank: those of its heads, and all that have none."""

        def linear(*parts: Tensor) -> Tensor:
            return torch.cat([part.to(dtype) for part in parts], dim=-1).flatten(1).mT.contiguous().to(device)

        index, own = self.index, ("W_UQ", "W_QR", "W_UK", "W_UV")
        heads = {name: getattr(self.weights, name).chunk(case.tp, dim=1)[rank] for name in own}
        w = replace(self.weights, **heads, W_O=self.weights.W_O.chunk(case.tp)[rank])
        assert w.W_DQ is not None and w.q_norm is not None and w.kv_norm is not None
        indexer = interface.SparseIndexerWeights(
            wq_b=linear(index.wq_b),
            wk=linear(index.wk),
            k_norm_weight=index.k_norm.to(device, torch.float32),
            k_norm_bias=index.k_norm_bias.to(device, torch.float32),
            weights_proj=linear(index.weights_proj),
        )
        return interface.SparseLayerWeights(
            q_a_proj=linear(w.W_DQ),
            q_a_layernorm=w.q_norm.to(device, dtype),
            q_b_proj=linear(w.W_UQ, w.W_QR),
            kv_a_proj_with_mqa=linear(w.W_DKV, w.W_KR),
            kv_a_layernorm=w.kv_norm.to(device, dtype),
            kv_b_proj=linear(w.W_UK, w.W_UV),
            o_proj=linear(w.W_O),
            indexer=None if case.shared else indexer,
        )


@lru_cache(maxsize=1)  # for the batches of one layer: hundreds of MB, which nobody writes
def _drawn(
    dims: ModelDimensions, index_heads: int, queries: int, seed: int
) -> tuple[MLAWeights, layer.IndexerWeights, list[int]]:
    """Weights of the attention and of the indexer, and in how many quarters each pair turns."""
    heads, head, latent, query = dims.num_heads, dims.head, dims.kv_lora_rank, queries * INDEX_DIM
    rope, generator = head.qk_rope_head_dim, torch.Generator().manual_seed(seed)
    sizes = (query, latent, rope, INDEX_DIM, index_heads)
    w_dq, w_dkv, w_kr, wk, weights_proj = _picks(dims.hidden_size, sum(sizes), generator).split(sizes, dim=1)
    weights = MLAWeights(
        W_DQ=w_dq,
        W_UQ=selection(query, heads, head.qk_nope_head_dim, generator),
        W_QR=selection(query, heads, rope, generator),
        W_DKV=w_dkv,
        W_UK=selection(latent, heads, head.qk_nope_head_dim, generator),
        W_KR=w_kr,
        W_UV=selection(latent, heads, head.v_head_dim, generator),
        W_O=_picks(dims.hidden_size, heads * head.v_head_dim, generator).mT,
        q_norm=_powers(query, (0.25, 1.0, 4.0), generator),
        kv_norm=_powers(latent, (1.0, 2.0), generator),
    )
    every = _picks(query, query, generator).unflatten(1, (queries, INDEX_DIM))
    index = layer.IndexerWeights(
        wq_b=every[:, torch.arange(index_heads) % queries],
        wk=wk,
        k_norm=_powers(INDEX_DIM, (0.5, 1.0, 2.0), generator),
        k_norm_bias=_powers(INDEX_DIM, (-0.75, 0.0, 0.75), generator),
        weights_proj=weights_proj,
    )
    drawn = torch.randint(len(_QUARTERS), (rope // 2,), generator=generator).tolist()
    return weights, index, [_QUARTERS[number] for number in drawn]


def put(x: Tensor, picks: Tensor, values: Tensor) -> Tensor:
    """Rows [T, in] of which weights [in, out] pick these values [T, out]; other columns stay as they are."""
    rows, columns = picks.nonzero(as_tuple=True)  # one of each column
    rows = rows[columns.argsort()]
    return x.index_copy(1, rows, values / picks[rows, torch.arange(picks.shape[1])])


def _picks(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return selection(rows, 1, columns, generator)[:, 0]


def _powers(columns: int, values: tuple[float, ...], generator: torch.Generator) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (columns,), generator=generator)]
