"""What the role sparse_layer is: how its classes are validated and made, and what they are judged by."""

from collections.abc import Sequence
from typing import Any

import torch

from mla_conformance.backends.prepare import IndexPreparation
from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse_layer import MLASparseLayerBackend, MLASparseLayerConfig
from mla_conformance.roles.definition import RoleDefinition, validated
from mla_conformance.roles.sparse_layer.call import SparseLayerCall
from mla_conformance.roles.sparse_layer.case import INDEX_DIM, SparseLayerCase
from mla_conformance.roles.sparse_layer.judge import SparseLayerJudge
from mla_conformance.roles.sparse_layer.problem import sparse_layer_problem
from mla_conformance.roles.sparse_layer.weights import EPSILON


def _config(case: SparseLayerCase, dtype: torch.dtype, rank: int = 0) -> MLASparseLayerConfig:
    head = case.dimensions
    return MLASparseLayerConfig(
        dtype=dtype,
        num_heads=case.heads // case.tp,
        scale=case.softmax_scale,
        qk_nope_head_dim=head.qk_nope_head_dim,
        qk_rope_head_dim=head.qk_rope_head_dim,
        v_head_dim=head.v_head_dim,
        kv_lora_rank=case.kv_lora_rank,
        is_neox_style=case.layer_pairs == "halves",
        rms_norm_eps=EPSILON,
        preparation=IndexPreparation(
            head_dim=INDEX_DIM,
            rope_dim=head.qk_rope_head_dim,
            rope_first=not case.rope_last,
            is_neox_style=case.pairs == "halves",
            hadamard=False,
            scale_format=case.index_scales,
            fold_scales=True,
            eps=EPSILON,
        ),
        index_n_heads=case.index_heads,
        topk_tokens=case.topk,
        skip_topk=case.shared,
        kv_cache_dtype=case.cache,
        tile_scales=case.scales,
        index_kv_cache_dtype=case.index_cache,
        block_size=case.page,
        tp_size=case.tp,
        tp_rank=rank,
    )


def _kernel(kernel: Any, case: SparseLayerCase, dtype: torch.dtype, *_: Any) -> Any:
    """A new layer of the sizes and conventions of ``case``, on as many ranks as it has."""
    layers = [kernel(_config(case, dtype, rank), vllm_config=None) for rank in range(case.tp)]
    return layers[0] if case.tp == 1 else LayersOnRanks(layers)


class LayersOnRanks:
    """The ranks in this process, one after another: none waits for what another one computes."""

    def __init__(self, layers: Sequence[MLASparseLayerBackend]) -> None:
        self._layers = layers

    def prepare(self, parts: Sequence[SparseLayerCall]) -> None:
        """Weights and metadata of every rank."""
        for layer, part in zip(self._layers, parts, strict=True):
            part.prepare(layer)

    def forward(self, parts: Sequence[SparseLayerCall]) -> list[Any]:
        """What every rank returns, on memory as it was before."""
        for part in parts:
            part.reset()
        return [part.returned(layer) for layer, part in zip(self._layers, parts, strict=True)]

    def kernel_evidence(self) -> dict[str, str]:
        """What the layer of the first rank says of itself."""
        reported: dict[str, str] = getattr(self._layers[0], "kernel_evidence", dict)()
        return reported


SPARSE_LAYER = RoleDefinition(
    role=Role.SPARSE_LAYER,
    problem=sparse_layer_problem,
    kernel=_kernel,
    reasons=validated(_config),
    judge=SparseLayerJudge,
)
