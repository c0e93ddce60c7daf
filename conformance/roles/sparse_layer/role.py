"""What the role sparse_layer is: how its classes are validated and made, and what they are judged by."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mla_conformance.backends.prepare import IndexPreparation
from mla_conformance.backends.roles import Role
from mla_conformance.backends.sparse_layer import MLASparseLayerBackend, MLASparseLayerConfig
from mla_conformance.judging.judge import AttentionJudge
from mla_conformance.judging.verdict import Check
from mla_conformance.roles.definition import RoleDefinition
from mla_conformance.roles.sparse_layer.call import SparseLayerCall
from mla_conformance.roles.sparse_layer.case import INDEX_DIM
from mla_conformance.roles.sparse_layer.problem import SparseLayerBatch
from mla_conformance.roles.sparse_layer.weights import EPSILON


class LayersOnRanks:
    """The ranks in this process, one after another: none waits for what another one computes."""

    def __init__(self, layers: Sequence[MLASparseLayerBackend]) -> None:
        self._layers = layers

    def prepare(self, parts: Sequence[SparseLayerCall]) -> None:
        for layer, part in zip(self._layers, parts, strict=True):
            part.prepare(layer)

    def forward(self, parts: Sequence[SparseLayerCall]) -> list[Any]:
        """What every rank returns, on memory as it was before."""
        for part in parts:
            part.reset()
        return [part.returned(layer) for layer, part in zip(self._layers, parts, strict=True)]

    def kernel_evidence(self) -> dict[str, str]:
        reported: dict[str, str] = getattr(self._layers[0], "kernel_evidence", dict)()
        return reported


class SparseLayerJudge(AttentionJudge):
    """What it wrote first, since a wrong selection explains a wrong output, then its attention."""

    writes: ClassVar = Check.WRITTEN
    writes_first: ClassVar = True


class _SparseLayer(RoleDefinition):
    def kernel(self, kernel: Any, case: Any, dtype: torch.dtype, device: torch.device) -> Any:
        configs = [self.config_of(case, dtype, tp_rank=rank) for rank in range(case.tp)]
        layers = [kernel(config, vllm_config=None) for config in configs]
        return layers[0] if case.tp == 1 else LayersOnRanks(layers)


SPARSE_LAYER = _SparseLayer(
    role=Role.SPARSE_LAYER,
    batch=SparseLayerBatch,
    config=MLASparseLayerConfig,
    facts=lambda case, dtype: {
        "num_heads": case.heads // case.tp,
        "is_neox_style": case.layer_pairs == "halves",
        "rms_norm_eps": EPSILON,
        "preparation": IndexPreparation(
            head_dim=INDEX_DIM,
            rope_dim=case.dimensions.qk_rope_head_dim,
            rope_first=not case.rope_last,
            is_neox_style=case.pairs == "halves",
            hadamard=False,
            scale_format=case.index_scales,
            fold_scales=True,
            eps=EPSILON,
        ),
        "index_n_heads": case.index_heads,
        "topk_tokens": case.topk,
        "skip_topk": case.shared,
        "index_kv_cache_dtype": case.index_cache,
        "tp_size": case.tp,
        "tp_rank": 0,
    },
    judge=SparseLayerJudge,
)
